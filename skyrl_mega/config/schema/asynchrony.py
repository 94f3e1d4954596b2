"""How far rollouts may be ahead of training."""

from __future__ import annotations

from dataclasses import dataclass

from skyrl_mega.config.schema.fields import at_least, one_of


@dataclass
class AsynchronyConfig:
    """Whether engines generate while the policy trains (docs/asynchrony.md)."""

    mode: str = one_of("off", "one_step", "full")
    """off: a step generates, and then trains. one_step: while a step trains, the next one's batch is generated as a
    whole, with weights that are one step old; a sync waits for its end. full: groups are generated all the time; a step
    takes those that are done, and a sync changes the weights under those that are not."""
    max_staleness: int = at_least(0, 1)
    """How many syncs the weights that wrote any token may lie behind those that train on it. one_step: 0 or 1. 0 is
    what `mode=off` does, by other means."""
