"""The policy's answers of a step: tokens and reward of each."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from skyrl_mega.rollout.trajectory import Kind, Trajectory

ROUNDING = 1e-9
"""Relative rounding error of reward sums; smaller remainders count as 0."""


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
        """Collects the answers of these trajectories."""
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
