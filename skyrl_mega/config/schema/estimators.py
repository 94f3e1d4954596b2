"""Built-in advantage estimators: the function of each, and the traits that settings, planner and health checks ask for.

A user's own estimator (`algorithm.advantage` as import path) has the traits of `OWN`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class EstimatorTraits:
    """Traits of an advantage estimator."""

    function: str = ""
    """The function: `file:name` in `algorithms/advantages/`."""
    compares: Literal["", "rewards", "named", "turns", "returns"] = ""
    """Quantity compared between the samples of a prompt, which then needs at least two. rewards: of trajectories.
    named: each of the environment's rewards. turns: rewards of answers, turn by turn. returns: rewards from a turn on.
    Empty: samples are not compared."""
    best_only: bool = False
    """True if only a single best sample has an advantage."""
    normalizes: bool = False
    """True if `algorithm.normalize` divides by the group's standard deviation."""
    discounts: bool = False
    """True if `algorithm.gamma` has an effect."""
    greedy: bool = False
    """True if a greedy answer (temperature 0) to each prompt is needed."""
    critic: bool = False
    """True if a critic's values are needed."""
    against_kl: str = ""
    """Reason against KL in the reward; empty if allowed."""
    against_overlong: str = ""
    """Refusal of a punishment for overlong answers; empty if allowed."""


OWN = EstimatorTraits(discounts=True)
ESTIMATORS = {
    "grpo": EstimatorTraits("group:grpo", compares="rewards", normalizes=True),
    "rloo": EstimatorTraits("group:rloo", compares="rewards"),
    "opo": EstimatorTraits("group:opo", compares="rewards"),
    "pass_at_k": EstimatorTraits("group:pass_at_k", compares="rewards", best_only=True),
    "maxrl": EstimatorTraits(
        "group:maxrl",
        compares="rewards",
        against_kl="divides by rewards, which KL makes negative",
        against_overlong="its punishment makes rewards negative, which algorithm.advantage=maxrl divides by; give 0, "
        "or another estimator",
    ),
    "gpg": EstimatorTraits("group:gpg", compares="rewards"),
    "gdpo": EstimatorTraits(
        "multi_reward:gdpo",
        compares="named",
        against_kl="uses only the environment's named rewards",
        against_overlong="algorithm.advantage=gdpo looks at each of the environment's rewards, which the punishment is "
        "not; give 0, and a reward for the length in the environment",
    ),
    "grpo_turns": EstimatorTraits("turns:grpo_turns", compares="turns", normalizes=True),
    "optimal_token_baseline": EstimatorTraits("token_baseline:optimal_token_baseline", compares="returns"),
    "remax": EstimatorTraits("greedy:remax", greedy=True, against_kl="has a baseline without the KL penalty"),
    "reinforce": EstimatorTraits("whole_batch:reinforce"),
    "reinforce++": EstimatorTraits("turns:reinforce_plus_plus", discounts=True),
    "reinforce++_baseline": EstimatorTraits("whole_batch:reinforce_plus_plus_baseline", compares="rewards"),
    "gae": EstimatorTraits("gae:gae", discounts=True, critic=True),
}
"""Values of `algorithm.advantage`. `@per_token` at the function names the columns that advantages of tokens need."""
