"""Which groups a step learns from: DAPO's dynamic sampling (arXiv:2503.14476, section 3.2) and POLARIS's copies.

A group whose samples all earn the same reward has zero advantages and only dilutes the batch. Dynamic sampling draws
further prompts until the batch is full of groups that differ (equation 11: 0 < number of correct samples < n). Judge
the rewards as the environment gave them, before any length shaping: the shaping would make equal answers differ. A
sample whose environment failed has earned nothing that could be compared.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from skyrl_mega.algorithms.advantages.base import beyond_rounding, check_finite


def informative_groups(rewards_GN: Tensor, judged_GN: Tensor | None = None, tolerance: float = 0.0) -> Tensor:
    """Whether each group's rewards differ: [G, n] → bool [G]. For ragged groups see `advantages.varied`.

        max(r) - min(r) > tolerance        over the samples that count, by more than rounding

    Args:
        rewards_GN: float [G, n].
        judged_GN: bool [G, n], the samples that count; None: all.
        tolerance: Rewards that differ by no more are taken for the same: 0.4 and 0.3 with 0.1, though their difference
            is rounded up.

    Raises:
        ValueError: A reward that counts is NaN or infinite.
    """
    judged_GN = torch.ones_like(rewards_GN, dtype=torch.bool) if judged_GN is None else judged_GN
    check_finite(rewards_GN[judged_GN])
    highest = rewards_GN.masked_fill(~judged_GN, -torch.inf).amax(dim=1)
    lowest = rewards_GN.masked_fill(~judged_GN, torch.inf).amin(dim=1)
    return beyond_rounding(highest - lowest - tolerance, torch.maximum(highest.abs(), lowest.abs()))


def with_copies(groups: int, wanted: int, seed: Sequence[int]) -> list[int]:
    """Which group stands at each of the `wanted` places of a step that has fewer with a signal (POLARIS, and SkyRL's
    `replace`): each of them once, and for every place that is left one that is drawn, each as likely as another.

    A copy stands beside its original, so that both are in one mini-batch but for its ends: there the group weighs
    double, where a copy in a later one would be a second epoch on it.

    Args:
        groups: Groups with a signal, at least 1.
        wanted: Groups of the step, at least as many.
        seed: Of what is drawn.
    """
    drawn = np.random.default_rng([*seed, 29]).integers(groups, size=wanted - groups)
    return sorted([*range(groups), *drawn.tolist()])
