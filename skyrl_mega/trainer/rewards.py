"""Rewards by name, for environments with several."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from skyrl_mega.rollout.trajectory import Trajectory
from skyrl_mega.trainer.turns import ROUNDING

UNNAMED = ""
"""Name for reward without a name; not weighted, neither here nor in the trajectory's reward."""


def rewards_by_name(played: Sequence[Trajectory], weights: Mapping[str, float]) -> dict[str, list[float]]:
    """Returns each trajectory's reward under each name, 0 for absent names; {} if no environment names rewards.

    Reward without a name (an answer judged by a number alone, parts of an answer) is listed as `UNNAMED`.

    Args:
        played: The trajectories.
        weights: `algorithm.reward_weights`, the weights of the named rewards in the trajectories' totals.
    """
    names = sorted({name for t in played for name in t.rewards})
    rewards = {name: [t.rewards.get(name, 0.0) for t in played] for name in names}
    if names and any(unnamed := [_unnamed_reward(t, weights) for t in played]):
        rewards[UNNAMED] = unnamed
    return rewards


def _unnamed_reward(t: Trajectory, weights: Mapping[str, float]) -> float:
    weighted = [weights.get(name, 1.0) * value for name, value in t.rewards.items()]
    rest = t.reward - math.fsum(weighted)
    return rest if abs(rest) > ROUNDING * max(1.0, *map(abs, weighted), abs(t.reward)) else 0.0
