"""Settings of asynchronous training."""

from __future__ import annotations

from dataclasses import dataclass

from skyrl_mega.config.schema.fields import at_least, one_of


@dataclass
class AsynchronyConfig:
    """Generation by the engines while the policy trains (docs/asynchrony.md)."""

    mode: str = one_of("off", "one_step", "full")
    """Schedule of generation and training. off: each step generates, then trains. one_step: while a step trains, the
    engines generate the whole batch of the next step with the weights of the step before; the weight sync waits until
    the batch is complete. full: engines generate all the time; a step trains on finished groups, and a weight sync also
    changes the weights of unfinished groups."""
    max_staleness: int = at_least(0, 1)
    """Maximum number of weight syncs between sampling a token and training on it. one_step allows 0 or 1. 0 gives the
    batches of `mode=off` by another mechanism."""
