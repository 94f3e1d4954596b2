"""Which of the trajectories that were generated a step learns from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from skyrl_mega.config.schema.fields import at_least, between, one_of


@dataclass
class DynamicSamplingConfig:
    """DAPO: every group of a step has a signal, rewards that differ. The settings below need `enabled`."""

    enabled: bool = False
    """Whether groups without a signal leave the step."""
    mode: str = one_of("filter", "replace")
    """What comes in their place. filter: new prompts, in further rounds. replace: copies of the step's groups with a
    signal, drawn from the run's seed, as soon as these are `replace_from` of what the step needs (POLARIS); until then
    new prompts."""
    replace_from: float = between(0, 1, 0.3)
    """Of mode=replace: share of `data.prompts_per_step` that must have a signal before the others become copies; 0: one
    group is enough."""
    max_rounds: int = at_least(1, 10)
    """Generation rounds for one step at most; past it the step takes the groups it has, and says so where that
    is at most half of them. 1 with mode=filter leaves groups without a signal out of the loss and draws no others."""
    oversample: float = at_least(1, 1.0)
    """Prompts that a round draws, as a multiple of the groups that are still missing. Of more groups with a signal than
    the step needs it takes those that were drawn first, not those that were done first, which would be the short ones;
    the rest is not used, and its prompts are not drawn again in this epoch."""
    tolerance: float = at_least(0, 0.0)
    """A group whose highest and lowest reward differ by no more has no signal. They are compared in float32, from
    which advantages are made."""
    reward: Optional[str] = None
    """Name of the one of an environment's several rewards that is compared. None: what advantages compare, which is
    their weighted sum; with advantage=gdpo each of them, and with grpo_turns the rewards of answers turn by turn: one
    that differs is enough. Every trajectory that an environment completes must name it."""


@dataclass
class OverlongConfig:
    """DAPO: what happens to responses near or past the length limit."""

    filter: bool = False
    """Truncated trajectories are masked out of the loss."""
    filter_by: str = one_of("budgets", "tokens")
    """Of filter: which ones. budgets: those that a budget of tokens, turns or time ended; tokens: a budget of tokens
    alone, as DAPO's, which knows no other."""
    buffer: int = at_least(0, 0)
    """Tokens before the limit over which the punishment grows linearly; 0 turns it off."""
    penalty: float = at_least(0, 1.0)
    """Punishment at the limit."""
