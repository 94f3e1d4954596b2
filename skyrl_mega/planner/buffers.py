"""megatron-core 0.16's flat buffers: what data parallelism and the distributed optimizer really allocate.

A model chunk's parameters lie in one buffer for the dense ones and one for the experts, last parameter first, each
beginning at a multiple of 64 elements; a buffer, and an embedding that two stages share within it, ends at a multiple
of 128 elements and of the data-parallel size. Where communication overlaps with compute, the first stage's first chunk
is cut into buckets of `BUCKET` elements or a little more, and each ends so. Rank r of n owns the r-th of n equal parts
of every bucket.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import lcm

import numpy as np

from skyrl_mega.parallel.dims import ParallelDims, RankCoords
from skyrl_mega.planner.parameters import Bools, Ints, Parameters

START = 64
"""A parameter begins at a multiple of so many elements."""
END = 128
"""A bucket ends at a multiple of so many elements."""
BUCKET = (40_000_000, 1_000_000)
"""Elements after which a bucket ends where communication overlaps: so many, or so many for each data-parallel rank."""
GRADIENT = 4
"""Bytes of one gradient: they accumulate in float32 (`policy.build.wrap_ddp`)."""
MOMENTS = {"float32": 8, "bfloat16": 4}
"""Bytes of Adam's two moments of one element (`policy.optimizer.moments`)."""
MASTER = 4
"""Bytes of one element's float32 master weight, which a float32 model does without."""


@dataclass(frozen=True)
class Held:
    """Bytes that a policy rank holds all the time. Counted, not estimated."""

    weights: int
    gradients: int
    optimizer: int
    largest: int = 0
    """Of the optimizer's, what belongs to the one parameter of which the rank trains most."""

    @property
    def total(self) -> int:
        """Weights, gradients and the optimizer's state."""
        return self.weights + self.gradients + self.optimizer


def held(
    chunks: Sequence[Parameters],
    parallel: ParallelDims,
    at: RankCoords,
    itemsize: int,
    freeze_router: bool = False,
    *,
    overlap: bool = False,
    moments: int = MOMENTS["float32"],
) -> Held:
    """What the rank at `at` allocates for its model chunks.

    Args:
        chunks: From `parameters.stage`.
        itemsize: Bytes of a parameter: 2 with master weights beside it, 4 without.
        overlap: Communication overlaps with compute.
        moments: Bytes of an element's two moments.
    """
    weights = gradients = owned = largest = 0
    for i, chunk in enumerate(chunks):
        full = full_bucket(parallel, at, i) if overlap else None
        frozen = chunk.router & freeze_router
        weights += int(chunk.numel[frozen].sum()) * itemsize
        # Without expert parallelism experts are dense parameters to megatron-core.
        experts = chunk.expert & (parallel.expert > 1)
        for chosen, size, index in (
            (~experts, parallel.data * parallel.context, at.dp * parallel.context + at.cp),
            (experts, parallel.expert_data, at.edp),
        ):
            made = buffer(chunk.where(chosen & ~frozen), size, full)
            weights += made.numel * itemsize
            gradients += made.numel * GRADIENT
            owned += made.owned(index)
            largest = max(largest, made.largest(index))
    state = moments + (MASTER if itemsize == 2 else 0)
    return Held(weights, gradients, owned * state, largest * state)


def full_bucket(parallel: ParallelDims, at: RankCoords, chunk: int) -> int | None:
    """Elements after which a bucket ends where communication overlaps; None where a buffer is one bucket."""
    return max(BUCKET[0], BUCKET[1] * parallel.data) if at.pp == chunk == 0 else None


@dataclass(frozen=True)
class Buffer:
    """Parameters one after the other, in buckets that are shared out over the data-parallel ranks."""

    start: Ints
    """Where each parameter begins in its bucket [n]."""
    size: Ints
    """Its elements [n]."""
    copies: Ints
    """`Parameters.copies` [n]."""
    bucket: Ints
    """The bucket in which it lies [n]."""
    lengths: Ints
    """Elements of each bucket, with padding."""
    ranks: int
    """Ranks over which a bucket is shared out."""

    @property
    def numel(self) -> int:
        """Elements with padding."""
        return int(self.lengths.sum())

    def runs(self, index: int) -> Ints:
        """First and last element of each parameter in the parts of rank `index`, [n, 2]; equal where there is none."""
        part = (self.lengths // self.ranks)[self.bucket]
        ends = np.stack([index * part, (index + 1) * part], axis=1)
        return (ends - self.start[:, None]).clip(0, self.size[:, None])

    def largest(self, index: int) -> int:
        """Elements of the parameter that has most in the parts of rank `index`."""
        runs = self.runs(index)
        return int((runs[:, 1] - runs[:, 0]).max(initial=0))

    def owned(self, index: int) -> int:
        """Elements of parameters in the parts of rank `index`."""
        first, last = self.runs(index).sum(axis=0)
        return int(last - first)


def buffer(parameters: Parameters, ranks: int, full: int | None = None) -> Buffer:
    """The buffer of these parameters over `ranks` data-parallel ranks; a bucket of `full` elements or more is full."""
    size, alone = parameters.numel[::-1], parameters.shared[::-1]
    place = np.concatenate([[0], np.cumsum(-(-size // START) * START)])
    start, end = place[:-1], place[:-1] + size
    first = np.array([cut for run in _runs(alone) for cut in _cut(start, end, run, full)], int)
    last = np.append(first, len(size))[1:] - 1
    unit = lcm(ranks, END)
    lengths = -(-(end[last] - start[first]) // unit) * unit
    bucket = np.repeat(np.arange(len(first)), last - first + 1)
    return Buffer(start - start[first][bucket], size, parameters.copies[::-1], bucket, lengths, ranks)


def _runs(alone: Bools) -> list[range]:
    """Neighbours that may share a bucket: a parameter that stands alone has its own."""
    cuts = sorted({0, len(alone), *(i + k for i in np.flatnonzero(alone).tolist() for k in (0, 1))})
    return [range(a, b) for a, b in pairwise(cuts)]


def _cut(start: Ints, end: Ints, run: range, full: int | None) -> Iterator[int]:
    """The first parameter of each bucket in a run: one ends behind the parameter with which it is full."""
    at = run.start
    while at < run.stop:
        yield at
        at = run.stop if full is None else int(np.searchsorted(end, start[at] + full)) + 1
