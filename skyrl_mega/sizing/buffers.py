"""megatron-core 0.16's flat buffers: what data parallelism and the distributed optimizer really allocate.

A model chunk's parameters lie in one buffer for the dense ones and one for the experts, last parameter first, each
beginning at a multiple of 64 elements; a buffer, and an embedding that two stages share within it, ends at a multiple
of 128 elements and of the data-parallel size. Rank r of n owns the r-th of n equal parts of every bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import lcm

import numpy as np

from skyrl_mega.layout.parallel import Coordinates, Parallel
from skyrl_mega.sizing.parameters import Bools, Ints, Parameters

START = 64
"""A parameter begins at a multiple of so many elements."""
END = 128
"""A bucket ends at a multiple of so many elements."""
GRADIENT = 4
"""Bytes of one gradient: they accumulate in float32 (`policy.build.wrap_ddp`)."""
MOMENTS = 8
"""Bytes of Adam's two moments of one element, in float32."""
MASTER = 4
"""Bytes of one element's float32 master weight, which a float32 model does without."""


@dataclass(frozen=True)
class Held:
    """Bytes that a policy rank holds all the time. Counted, not estimated."""

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """All three."""
        return self.weights + self.gradients + self.optimizer


def held(
    chunks: Sequence[Parameters], parallel: Parallel, at: Coordinates, itemsize: int, freeze_router: bool = False
) -> Held:
    """What the rank at `at` allocates for its model chunks.

    Args:
        chunks: From `parameters.stage`.
        itemsize: Bytes of a parameter: 2 with master weights beside it, 4 without.
    """
    weights = gradients = owned = 0
    for chunk in chunks:
        frozen = chunk.router & freeze_router
        weights += int(chunk.numel[frozen].sum()) * itemsize
        # Without expert parallelism experts are dense parameters to megatron-core.
        experts = chunk.expert & (parallel.expert > 1)
        for chosen, size, index in (
            (~experts, parallel.data * parallel.context, at.dp * parallel.context + at.cp),
            (experts, parallel.expert_data, at.edp),
        ):
            for bucket in buckets(chunk.where(chosen & ~frozen), size):
                weights += bucket.numel * itemsize
                gradients += bucket.numel * GRADIENT
                owned += bucket.owned(index, size)
    return Held(weights, gradients, owned * (MOMENTS + (MASTER if itemsize == 2 else 0)))


@dataclass(frozen=True)
class Bucket:
    """A run of a buffer that is shared out over the data-parallel ranks."""

    start: Ints
    """Where each parameter begins [n]."""
    size: Ints
    """Its elements [n]."""
    numel: int
    """Elements with padding."""

    def owned(self, index: int, ranks: int) -> int:
        """Elements of parameters in the part of rank `index`."""
        part = self.numel // ranks
        low, high = index * part, (index + 1) * part
        return int((np.minimum(self.start + self.size, high) - np.maximum(self.start, low)).clip(min=0).sum())


def buckets(parameters: Parameters, ranks: int) -> list[Bucket]:
    """The buckets of one buffer over `ranks` data-parallel ranks."""
    numel, alone = parameters.numel[::-1], parameters.shared[::-1]
    return [_bucket(numel[run], ranks) for run in _runs(alone)]


def _bucket(numel: Ints, ranks: int) -> Bucket:
    ends = np.cumsum(-(-numel // START) * START)
    start = np.concatenate([[0], ends[:-1]])
    unit = lcm(ranks, END)
    return Bucket(start, numel, -(-int(start[-1] + numel[-1]) // unit) * unit)


def _runs(alone: Bools) -> list[slice]:
    """Neighbours that share a bucket: an entry that stands alone has its own."""
    cuts = sorted({0, len(alone), *(i + k for i in np.flatnonzero(alone).tolist() for k in (0, 1))})
    return [slice(a, b) for a, b in pairwise(cuts)]
