"""Selection of groups with a learning signal: DAPO's dynamic sampling (arXiv:2503.14476, section 3.2) and POLARIS's
copies.

A group of samples with equal rewards has zero advantages and only dilutes the batch. Dynamic sampling draws further
prompts until the batch is full of groups with different rewards (equation 11: 0 < number of correct samples < n). Use
the rewards as given by the environment, before any length shaping: shaping would make equal answers differ. A sample
with a failed environment has no comparable reward.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from skyrl_mega.algorithms.advantages.base import beyond_rounding, check_finite


def informative_groups(rewards_GN: Tensor, judged_GN: Tensor | None = None, tolerance: float = 0.0) -> Tensor:
    """Returns True for each group with different rewards: [G, n] → bool [G]. For ragged groups see `advantages.varied`.

        max(r) - min(r) > tolerance        over the judged samples, by more than rounding

    False for a group with a single judged sample, or none.

    Args:
        rewards_GN: float [G, n].
        judged_GN: bool [G, n], the samples to compare; None: all.
        tolerance: Rewards with at most this difference count as equal: 0.4 and 0.3 with 0.1, although rounding
            increases the difference.

    Raises:
        ValueError: A judged reward is NaN or infinite.
    """
    judged_GN = torch.ones_like(rewards_GN, dtype=torch.bool) if judged_GN is None else judged_GN
    check_finite(rewards_GN[judged_GN])
    highest = rewards_GN.masked_fill(~judged_GN, -torch.inf).amax(dim=1)
    lowest = rewards_GN.masked_fill(~judged_GN, torch.inf).amin(dim=1)
    return beyond_rounding(highest - lowest - tolerance, torch.maximum(highest.abs(), lowest.abs()))


def with_copies(groups: int, wanted: int, seed: Sequence[int]) -> list[int]:
    """Returns a group index for each of the `wanted` places of a step, in ascending order; groups may repeat.

    As in POLARIS and SkyRL's `replace`, each group appears once and the remaining places are filled by uniformly drawn
    groups. A copy is next to its original, so both are usually in the same mini-batch and the group counts double; in a
    later mini-batch the copy would act as a second epoch.

    Args:
        groups: Number of informative groups, at least 1.
        wanted: Number of groups in the step, at least `groups`.
        seed: Seed of the draw; equal seeds draw equally.

    Raises:
        ValueError: `wanted` is below `groups`, or groups must be drawn from none.
    """
    drawn = np.random.default_rng([*seed, 29]).integers(groups, size=wanted - groups)
    return sorted([*range(groups), *drawn.tolist()])
