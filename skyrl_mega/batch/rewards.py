"""Rewards of a step's trajectories: per answer of the policy, and by name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from skyrl_mega.trajectories.trajectory import Kind, Trajectory

ROUNDING = 1e-9
"""Relative rounding error of reward sums; smaller remainders count as 0."""
UNNAMED = ""
"""Name for reward without a name; not weighted, neither here nor in the trajectory's reward."""


class Turns(NamedTuple):
    """R answers of N trajectories, ordered by trajectory. No answer is empty."""

    answers: Tensor
    """int64 [N]: answers per trajectory; 0 if the policy wrote nothing."""
    tokens: Tensor
    """int64 [R]: policy tokens per answer."""
    rewards: Tensor
    """float64 [R]: reward per answer; these add up to the trajectory's reward."""

    @classmethod
    def of(cls, trajectories: list[Trajectory]) -> Turns:
        """Returns the nonempty answers of these trajectories.

        The reward of an empty answer goes to the answer before (or to the first), and the part of a trajectory's reward
        given to no answer goes to the last. Without any nonempty answer the trajectory's reward is left out.
        """
        answers_by_trajectory = [_answers(t) for t in trajectories]
        answers = [answer for answers in answers_by_trajectory for answer in answers]
        return cls(
            torch.tensor([len(answers) for answers in answers_by_trajectory], dtype=torch.int64),
            torch.tensor([tokens for tokens, _ in answers], dtype=torch.int64),
            torch.tensor([reward for _, reward in answers], dtype=torch.float64),
        )


def _answers(t: Trajectory) -> list[tuple[int, float]]:
    """Returns (tokens, reward) of each nonempty answer. The reward of an empty answer goes to the previous answer, or
    to the first.

    Any part of the trajectory's reward not assigned to a step goes to the last answer.
    """
    steps = [s for s in t.steps if s.kind is Kind.RESPONSE]
    answers = [(s.end - s.start, s.reward or 0.0) for s in steps] or [(t.written, t.reward)]
    rest = t.reward - sum(reward for _, reward in answers)
    if abs(rest) <= ROUNDING * max(1.0, abs(t.reward)):
        rest = 0.0  # rounding must not make answers with equal rewards differ
    nonempty: list[tuple[int, float]] = []
    carried = 0.0
    for tokens, reward in answers:
        if tokens:
            nonempty.append((tokens, carried + reward))
            carried = 0.0
        elif nonempty:
            nonempty[-1] = (nonempty[-1][0], nonempty[-1][1] + reward)
        else:
            carried += reward
    if nonempty:
        nonempty[-1] = (nonempty[-1][0], nonempty[-1][1] + rest)
    return nonempty


def rewards_by_name(played: Sequence[Trajectory], weights: Mapping[str, float]) -> dict[str, list[float]]:
    """Returns each trajectory's reward under each name, 0 for absent names; {} if no environment names rewards. Each
    list has a value per trajectory, in order, not multiplied by a weight; the names are sorted.

    Reward without a name (an answer judged by a number alone, parts of an answer) is listed last, as `UNNAMED`, if any
    trajectory has such reward.

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
