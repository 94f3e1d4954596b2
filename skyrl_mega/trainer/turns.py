"""The policy's answers of a step: how many tokens each has, and what the environment gave for it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from skyrl_mega.rollout.trajectory import Kind, Trajectory

ROUNDING = 1e-9
"""What a sum of rewards may differ by, relative to it, and nothing was earned."""


class Turns(NamedTuple):
    """R answers of N trajectories, those of a trajectory one after another. All have at least one token."""

    answers: Tensor
    """int64 [N]: answers of each trajectory; 0 where the policy said nothing."""
    tokens: Tensor
    """int64 [R]: tokens that the policy wrote."""
    rewards: Tensor
    """float64 [R]: those of a trajectory sum to its reward."""

    @classmethod
    def of(cls, played: list[Trajectory]) -> Turns:
        """The answers of these trajectories."""
        found = [_answers(t) for t in played]
        flat = [answer for answers in found for answer in answers]
        return cls(
            torch.tensor([len(answers) for answers in found], dtype=torch.int64),
            torch.tensor([tokens for tokens, _ in flat], dtype=torch.int64),
            torch.tensor([reward for _, reward in flat], dtype=torch.float64),
        )


def _answers(t: Trajectory) -> list[tuple[int, float]]:
    """Tokens and reward of each answer with a token; one without leaves its reward to the one before it, or the first.

    What no step was given of the trajectory's reward is the last one's.
    """
    steps = [s for s in t.steps if s.kind is Kind.RESPONSE]
    told = [(s.end - s.start, s.reward or 0.0) for s in steps] or [(t.written, t.reward)]
    rest = t.reward - sum(reward for _, reward in told)
    if abs(rest) <= ROUNDING * max(1.0, abs(t.reward)):
        rest = 0.0  # an answer that earned as much as another must not differ from it
    found: list[tuple[int, float]] = []
    owed = 0.0
    for tokens, reward in told:
        if tokens:
            found.append((tokens, owed + reward))
            owed = 0.0
        elif found:
            found[-1] = (found[-1][0], found[-1][1] + reward)
        else:
            owed += reward
    if found:
        found[-1] = (found[-1][0], found[-1][1] + rest)
    return found
