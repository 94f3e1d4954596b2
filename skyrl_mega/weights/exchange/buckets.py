"""Buckets: the parts of every route, cut and grouped into messages of bounded size."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from skyrl_mega.weights.plan.intersect import Ints, TransferTable
from skyrl_mega.weights.plan.plan import Plan

ALIGNMENT = 16
"""Alignment of parts within a bucket, in bytes, so that a part can be viewed as any dtype."""


@dataclass(frozen=True)
class Buckets:
    """All messages of a plan, in the intended order of arrival."""

    parts: TransferTable
    """The plan's parts, cut if larger than a bucket."""
    route: list[int]
    """Route index of each bucket."""
    members: list[Ints]
    """Ascending indices into `parts`, for each bucket."""
    phase: list[int]
    """Phase of each bucket, 0 or 1. A receiver gets every bucket of phase 0 before any of phase 1."""

    def offsets(self, bucket: int) -> Ints:
        """Returns the byte offset of each part in the bucket with this index, [members]."""
        return _ends(self.parts.nbytes[self.members[bucket]])[:-1]

    def nbytes(self, bucket: int) -> int:
        """Returns the size of the bucket with this index in bytes, padding included."""
        return int(_ends(self.parts.nbytes[self.members[bucket]])[-1])


def fill(plan: Plan, bucket_bytes: int, first: frozenset[str] = frozenset()) -> Buckets:
    """Cuts the parts of every route into buckets of at most `bucket_bytes` (at least one element), and returns all
    buckets, those of phase 0 first, then in the order of the plan's parts. A bucket is a message: parts of one route
    (sender and receivers) and one phase.

    Args:
        plan: All transfers.
        bucket_bytes: Maximum size of a bucket with padding, rounded down to a multiple of `ALIGNMENT`.
        first: Names of the tensors of phase 0, which every receiver gets before all others (scales, needed to read the
            rest).
    """
    room = max(ALIGNMENT, bucket_bytes // ALIGNMENT * ALIGNMENT)
    parts, begin = cut(plan.parts, room)
    early = np.array([name in first for name in parts.tensors], bool)[parts.tensor]
    filled = []
    for number, route in enumerate(plan.routes):
        count = begin[route.parts + 1] - begin[route.parts]
        finer = np.repeat(begin[route.parts] - np.cumsum(count) + count, count) + np.arange(count.sum())
        for phase, members in enumerate((finer[early[finer]], finer[~early[finer]])):
            ends = _ends(parts.nbytes[members])
            at = 0
            while at < len(members):
                stop = max(at + 1, int(np.searchsorted(ends, ends[at] + room, "right")) - 1)
                filled.append((phase, int(members[at]), number, members[at:stop]))
                at = stop
    filled.sort(key=lambda bucket: bucket[:3])
    return Buckets(parts, [b[2] for b in filled], [b[3] for b in filled], [b[0] for b in filled])


def cut(parts: TransferTable, room: int) -> tuple[TransferTable, Ints]:
    """Cuts parts larger than `room` bytes along the leading axes into pieces of at most `room` bytes (at least one
    element), keeping the order.

    Returns:
        The finer table, and the index of each part's first piece in the table [parts + 1].
    """
    large = np.flatnonzero(parts.nbytes > room)
    count = np.ones(len(parts), np.int64)
    known: dict[tuple[tuple[int, ...], int], tuple[Ints, Ints]] = {}
    pieces = []
    for part in large.tolist():
        shape = tuple(parts.shape[part].tolist())
        size = int(parts.nbytes[part]) // int(np.prod(shape))
        if (shape, size) not in known:
            known[shape, size] = _slabs(shape, max(1, room // size))
        pieces.append(known[shape, size])
        count[part] = len(pieces[-1][0])
    begin = np.concatenate([[0], np.cumsum(count)])
    of = np.repeat(np.arange(len(parts)), count)
    start, shape_of, nbytes = parts.start[of], parts.shape[of].copy(), parts.nbytes[of].copy()
    for part, (shift, shapes) in zip(large.tolist(), pieces, strict=True):
        here = slice(begin[part], begin[part + 1])
        size = int(parts.nbytes[part]) // int(parts.shape[part].prod())
        start[here] += shift
        shape_of[here] = shapes
        nbytes[here] = shapes.prod(1) * size
    return TransferTable(parts.tensors, parts.tensor[of], start, shape_of, nbytes), begin


def _slabs(shape: tuple[int, ...], room: int) -> tuple[Ints, Ints]:
    """Cuts a box of `shape` into even slabs of at most `room` elements; returns starts and shapes [slabs, axes]."""
    if int(np.prod(shape)) <= room:
        return np.zeros((1, len(shape)), np.int64), np.array([shape], np.int64)
    axis = next(i for i, n in enumerate(shape) if n > 1)
    row = int(np.prod(shape[axis + 1 :]))
    count = min(shape[axis], -(-shape[axis] // max(1, room // row)))
    edges = np.arange(count + 1) * shape[axis] // count
    starts, shapes = [], []
    for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        start, inner = _slabs((*shape[:axis], high - low, *shape[axis + 1 :]), room)
        start[:, axis] += low
        starts.append(start)
        shapes.append(inner)
    return np.concatenate(starts), np.concatenate(shapes)


def _ends(nbytes: Ints) -> Ints:
    """Returns the aligned offset of each part, followed by the total size [parts + 1]."""
    return np.concatenate([[0], np.cumsum(-(-nbytes // ALIGNMENT) * ALIGNMENT)])
