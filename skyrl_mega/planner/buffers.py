"""Flat buffers of megatron-core 0.16: the real allocations of data parallelism and the distributed optimizer.

The parameters of a model chunk lie in two buffers, dense and expert, in reverse order, each starting at a multiple of
64 elements. The end of a buffer, and of an embedding shared by two stages within a buffer, is a multiple of 128
elements and of the data-parallel size. If communication overlaps with compute, the first stage's first chunk is cut
into buckets of at least `BUCKET` elements, each padded the same way. Rank r of n owns the r-th of n equal parts of
every bucket.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import lcm

import numpy as np

from skyrl_mega.parallel.dims import ParallelDims, RankCoords
from skyrl_mega.planner.parameters import Bools, Ints, Parameters

START = 64
"""Alignment of a parameter's start, in elements."""
END = 128
"""Alignment of a bucket's end, in elements."""
BUCKET = (40_000_000, 1_000_000)
"""Minimum size of a bucket in elements if communication overlaps: absolute, and per data-parallel rank. The larger
applies."""
GRADIENT = 4
"""Bytes of a gradient element; gradients accumulate in float32 (`megatron.model.wrap_ddp`)."""
MOMENTS = {"float32": 8, "bfloat16": 4}
"""Bytes of the two Adam moments per element, by `policy.optimizer.moments`."""
FLOAT32 = 4
"""Bytes of an element of a correction bias."""
MASTER = 4
"""Bytes of the float32 master weight per element; a float32 model keeps none."""


@dataclass(frozen=True)
class ModelState:
    """Permanent memory of a policy rank in bytes, counted from shapes."""

    weights: int
    """All parameters, with the padding of buffers."""
    gradients: int
    """Gradients of all trained parameters, in float32."""
    optimizer: int
    """Master weights and moments owned by this rank."""
    largest: int = 0
    """Part of `optimizer` that belongs to the parameter of which this rank owns the most elements."""

    @property
    def total(self) -> int:
        """Bytes of weights, gradients and optimizer state together."""
        return self.weights + self.gradients + self.optimizer


@dataclass(frozen=True)
class StageBuffers:
    """All buffers of a pipeline stage; the ranks of the stage own different parts of the same buffers."""

    frozen: int
    """Number of elements of frozen parameters in the model's type, which lie outside the buffers."""
    fixed: int
    """Number of elements of correction biases, which lie outside the buffers in float32."""
    dense: tuple[Buffer, ...]
    """Buffer of each model chunk, over the data-parallel ranks."""
    expert: tuple[Buffer, ...]
    """Buffer of each model chunk, over the data-parallel ranks of experts."""


def stage_buffers(
    chunks: Sequence[Parameters], parallel: ParallelDims, pp: int, freeze_router: bool, *, overlap: bool
) -> StageBuffers:
    """Returns the buffers of a pipeline stage.

    Args:
        chunks: Model chunks of a rank of the stage, from `parameters.stage`.
        parallel: The grid of ranks.
        pp: Pipeline stage, from 0.
        freeze_router: True if routers are not trained.
        overlap: True if communication overlaps with compute, which adds padding.
    """
    frozen, fixed, dense, expert = 0, 0, [], []
    for i, chunk in enumerate(chunks):
        full = full_bucket(parallel, pp, i) if overlap else None
        frozen += int(chunk.numel[chunk.router & freeze_router].sum())
        fixed += int(chunk.numel[chunk.fixed].sum())
        untrained = chunk.untrained(freeze_router)
        # Without expert parallelism experts are dense parameters to megatron-core.
        experts = chunk.expert & (parallel.expert > 1)
        dense.append(buffer(chunk.select(~experts & ~untrained), parallel.data * parallel.context, full))
        expert.append(buffer(chunk.select(experts & ~untrained), parallel.expert_data, full))
    return StageBuffers(frozen, fixed, tuple(dense), tuple(expert))


def rank_state(
    buffers: StageBuffers, parallel: ParallelDims, at: RankCoords, itemsize: int, moments: int
) -> ModelState:
    """Returns the bytes allocated by a rank for weights, gradients and optimizer state.

    Args:
        buffers: Buffers of the rank's pipeline stage, from `stage_buffers`.
        parallel: The grid of ranks.
        at: Coordinates of the rank in the grid.
        itemsize: Bytes of a parameter element: 2 or 4. With 2, the optimizer state includes float32 master weights.
        moments: Bytes of Adam's two moments per element, a value of `MOMENTS`.
    """
    owned = [flat.owned(at.dp * parallel.context + at.cp) for flat in buffers.dense]
    owned += [flat.owned(at.edp) for flat in buffers.expert]
    numel = sum(flat.numel for flat in (*buffers.dense, *buffers.expert))
    state = moments + (MASTER if itemsize == 2 else 0)
    return ModelState(
        weights=(buffers.frozen + numel) * itemsize + buffers.fixed * FLOAT32,
        gradients=numel * GRADIENT,
        optimizer=sum(elements for elements, _ in owned) * state,
        largest=max((largest for _, largest in owned), default=0) * state,
    )


def full_bucket(parallel: ParallelDims, pp: int, chunk: int) -> int | None:
    """Returns the number of elements at which a bucket is full if communication overlaps. None for every chunk but the
    first of the first stage: the buffer of such a chunk is a single bucket.

    Args:
        parallel: The grid of ranks.
        pp: Pipeline stage, from 0.
        chunk: Index of the model chunk on the rank, from 0.
    """
    return max(BUCKET[0], BUCKET[1] * parallel.data) if pp == chunk == 0 else None


@dataclass(frozen=True)
class Buffer:
    """Consecutive parameters in buckets. Every bucket is divided equally among the data-parallel ranks."""

    start: Ints
    """Start of each parameter in its bucket, in elements [n]."""
    size: Ints
    """Number of elements of each parameter [n]."""
    copies: Ints
    """`Parameters.copies` of each parameter [n]."""
    bucket: Ints
    """Bucket index of each parameter [n]."""
    lengths: Ints
    """Number of elements of each bucket, with padding."""
    ranks: int
    """Number of ranks sharing each bucket."""

    @cached_property
    def numel(self) -> int:
        """Number of elements of all buckets, with padding."""
        return int(self.lengths.sum())

    def runs(self, index: int) -> Ints:
        """Returns [n, 2]: start and end of data-parallel rank `index`'s run of each parameter, counted from
        the parameter's first element; equal if the rank owns nothing."""
        part = (self.lengths // self.ranks)[self.bucket]
        ends = np.stack([index * part, (index + 1) * part], axis=1)
        return (ends - self.start[:, None]).clip(0, self.size[:, None])

    def owned(self, index: int) -> tuple[int, int]:
        """Returns (elements of all parameters, elements of the parameter with most) owned by data-parallel rank
        `index`."""
        runs = self.runs(index)
        sizes = runs[:, 1] - runs[:, 0]
        return int(sizes.sum()), int(sizes.max(initial=0))


def buffer(parameters: Parameters, ranks: int, full: int | None = None) -> Buffer:
    """Returns megatron-core's buffer of `parameters` (stored in reverse order) over `ranks` data-parallel ranks.

    Args:
        parameters: The parameters, in the order of the model.
        ranks: Number of data-parallel ranks.
        full: Number of elements at which a bucket is full; None for a single bucket.
    """
    size, alone = parameters.numel[::-1], parameters.shared[::-1]
    place = np.concatenate([[0], np.cumsum(-(-size // START) * START)])
    start, end = place[:-1], place[:-1] + size
    first = np.array([cut for run in _bucket_ranges(alone) for cut in _bucket_starts(start, end, run, full)], int)
    last = np.append(first, len(size))[1:] - 1
    unit = lcm(ranks, END)
    lengths = -(-(end[last] - start[first]) // unit) * unit
    bucket = np.repeat(np.arange(len(first)), last - first + 1)
    return Buffer(start - start[first][bucket], size, parameters.copies[::-1], bucket, lengths, ranks)


def _bucket_ranges(alone: Bools) -> list[range]:
    """Returns ranges of neighbouring parameters that may share a bucket; each parameter flagged in `alone` needs a
    separate bucket."""
    cuts = sorted({0, len(alone), *(i + k for i in np.flatnonzero(alone).tolist() for k in (0, 1))})
    return [range(a, b) for a, b in pairwise(cuts)]


def _bucket_starts(start: Ints, end: Ints, run: range, full: int | None) -> Iterator[int]:
    """Yields the index of the first parameter of each bucket in a run. The parameter that fills a bucket is its
    last."""
    at = run.start
    while at < run.stop:
        yield at
        at = run.stop if full is None else int(np.searchsorted(end, start[at] + full)) + 1
