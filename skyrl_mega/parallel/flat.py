"""Runs of a flattened local tensor as boxes of global tensors.

Megatron's distributed optimizer gives a rank, of each local parameter, a run of its elements in C order: elements
`start … stop` of the flattened tensor. Such a run of an n-dimensional tensor is at most 2(n-1)+1 boxes of it, and each
of them, through the pieces of the shard, boxes of the global tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

from skyrl_mega.parallel.box import Box, Shard

Run = tuple[int, int]
"""Elements `start … stop` of a flattened local tensor."""


@dataclass(frozen=True, slots=True)
class FlatPiece:
    """Box `box` of global tensor `tensor` lies in local tensor `param`, its first element at flat index `at`."""

    tensor: str
    box: Box
    param: str
    at: int


def run_boxes(shape: tuple[int, ...], run: Run) -> Iterator[Box]:
    """The boxes of a tensor of this shape that a run of it is made of, in order; none where the run is empty."""
    start, stop = run
    if start >= stop:
        return
    inner = prod(shape[1:])
    (first, skipped), (last, beyond) = divmod(start, inner), divmod(stop, inner)
    if first == last:
        yield from _row(first, shape[1:], (skipped, beyond))
        return
    if skipped:
        yield from _row(first, shape[1:], (skipped, inner))
        first += 1
    if first < last:
        yield Box((first, *(0,) * len(shape[1:])), (last - first, *shape[1:]))
    if beyond:
        yield from _row(last, shape[1:], (0, beyond))


def flat_pieces(shard: Shard, runs: Mapping[str, Run]) -> list[FlatPiece]:
    """What the runs hold of the global tensors; local elements that no piece covers are left out.

    Args:
        shard: the rank's.
        runs: local tensor → elements; a local tensor that is not named holds nothing.
    """
    boxes = {param: list(run_boxes(shard.params[param], run)) for param, run in runs.items()}
    found = []
    for piece in shard.pieces:
        stack = len(piece.offset) - len(piece.box.shape)
        local = Box(piece.offset, (1,) * stack + piece.box.shape)
        for box in boxes.get(piece.param, ()):
            if common := box.intersect(local):
                shift = zip(piece.box.start, common.start[stack:], piece.offset[stack:], strict=True)
                here = Box(tuple(a + b - c for a, b, c in shift), common.shape[stack:])
                found.append(FlatPiece(piece.tensor, here, piece.param, index(shard.params[piece.param], common.start)))
    return found


def index(shape: tuple[int, ...], at: tuple[int, ...]) -> int:
    """The place of an element in the flattened tensor."""
    flat = 0
    for size, i in zip(shape, at, strict=True):
        flat = flat * size + i
    return flat


def strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Elements from one entry of each dimension to the next, in C order."""
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


def _row(row: int, shape: tuple[int, ...], run: Run) -> Iterator[Box]:
    """A part of one row: the boxes of `shape`, with the row before them."""
    if not shape:
        yield Box((row,), (1,))
        return
    for box in run_boxes(shape, run):
        yield Box((row, *box.start), (1, *box.shape))
