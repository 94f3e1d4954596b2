"""POLARIS's copies of groups with a learning signal, in place of groups without."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


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
