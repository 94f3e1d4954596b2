"""Settings for the selection of trajectories in a training step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from skyrl_mega.config.schema.fields import Refusals, at_least, between, one_of


@dataclass
class DynamicSamplingConfig:
    """DAPO's dynamic sampling: every group of a step has a signal (rewards that differ). All settings below need
    `enabled`."""

    enabled: bool = False
    """Drops groups without a signal from the step."""
    mode: str = one_of("filter", "replace")
    """Replacement of dropped groups. filter: new prompts, in further generation rounds. replace: copies of the step's
    groups with a signal, chosen by the run's seed, once these are `replace_from` of the required groups (POLARIS);
    before that, new prompts."""
    replace_from: float = between(0, 1, 0.3)
    """Share of `data.prompts_per_step` with a signal that `mode=replace` needs before copying groups; 0: a single group
    is enough."""
    max_rounds: int = at_least(1, 10)
    """Maximum number of generation rounds per step. After the last round the step uses the groups found so far; if
    these are at most half of the required number, the run reports it. 1 with mode=filter drops groups without a signal
    and samples no replacement."""
    oversample: float = at_least(1, 1.0)
    """Prompts sampled per round, as a multiple of the missing groups. If more groups than needed have a signal, the
    step keeps the groups sampled first rather than the groups finished first, because these are short. The surplus is
    dropped, and these prompts are not sampled again in this epoch."""
    tolerance: float = at_least(0, 0.0)
    """Largest difference between the highest and the lowest reward of a group without a signal. Rewards are compared in
    float32, as for advantages."""
    reward: Optional[str] = None
    """Name of the reward to compare, if an environment returns several; every completed trajectory must then include
    this name. null compares what the advantages compare: the weighted sum; with advantage=gdpo each reward; with
    grpo_turns the rewards of answers turn by turn. A group has a signal if any of these differs."""

    def refusals(self) -> Refusals:
        """Yields refusals of a non-default `mode`, `oversample`, `tolerance` or `reward` without `enabled`, which have
        no effect."""
        for name in ("mode", "oversample", "tolerance", "reward"):
            value = getattr(self, name)
            if not self.enabled and value != getattr(DynamicSamplingConfig(), name):
                fix = "give algorithm.dynamic_sampling.enabled=true, or leave it out"
                yield f"algorithm.dynamic_sampling.{name}", "there is no dynamic sampling", fix, str(value)


@dataclass
class OverlongConfig:
    """DAPO's treatment of responses near or past the length limit."""

    filter: bool = False
    """Masks truncated trajectories out of the loss."""
    filter_by: str = one_of("budgets", "tokens")
    """Trajectories masked by `filter`. budgets: ended by a limit on tokens, turns or time. tokens: ended by a token
    limit only, as in DAPO."""
    buffer: int = at_least(0, 0)
    """Number of tokens before the limit with a linearly growing length penalty; 0 disables the penalty."""
    penalty: float = at_least(0, 1.0)
    """Penalty at the limit."""

    def refusals(self) -> Refusals:
        """Yields a refusal of `filter_by` without `filter`."""
        if self.filter_by == "tokens" and not self.filter:
            fix = "give algorithm.overlong.filter=true, or leave it out"
            yield "algorithm.overlong.filter_by", "nothing is filtered", fix
