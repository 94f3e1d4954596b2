"""The rewards of environments that give several, by name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from skyrl_mega.rollout.trajectory import Trajectory
from skyrl_mega.trainer.turns import ROUNDING

PLAIN = ""
"""The name of what was earned without one: it has no weight, as it has none in the trajectory's reward."""


def by_name(played: Sequence[Trajectory], weights: Mapping[str, float]) -> dict[str, list[float]]:
    """What each trajectory earned under each name, 0 where it has none such; {} where no environment gives names.

    What was earned beside them (an answer that was judged with a number alone, parts of an answer) is one of its own,
    `PLAIN`.

    Args:
        played: The trajectories.
        weights: `algorithm.reward_weights`, with which the named rewards are in the trajectories'.
    """
    names = sorted({name for t in played for name in t.rewards})
    found = {name: [t.rewards.get(name, 0.0) for t in played] for name in names}
    if names and any(plain := [_plain(t, weights) for t in played]):
        found[PLAIN] = plain
    return found


def _plain(t: Trajectory, weights: Mapping[str, float]) -> float:
    parts = [weights.get(name, 1.0) * value for name, value in t.rewards.items()]
    rest = t.reward - math.fsum(parts)
    return rest if abs(rest) > ROUNDING * max(1.0, *map(abs, parts), abs(t.reward)) else 0.0
