"""Runs of a flattened local tensor as boxes of global tensors.

Megatron's distributed optimizer gives a rank a run of each local parameter in C order: elements `start … stop` of the
flattened tensor. Such a run of an n-dimensional tensor consists of at most 2(n-1)+1 boxes. Through the pieces of the
shard, each box maps to boxes of the global tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

from skyrl_mega.parallel.box import Box, Shard

Run = tuple[int, int]
"""(start, stop): elements `start … stop - 1` of a flattened local tensor."""


@dataclass(frozen=True, slots=True)
class FlatPiece:
    """The position of box `box` of global tensor `tensor`: in local tensor `param`, starting at flat index `at`."""

    tensor: str
    box: Box
    param: str
    at: int


def run_boxes(shape: tuple[int, ...], run: Run) -> Iterator[Box]:
    """Yields boxes that together contain exactly the elements of a run of a tensor with shape `shape`, in order; none
    for an empty run. `run` is (start, stop), flat indices in C order."""
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
    """Returns the boxes of global tensors whose elements lie in the runs, in the order of the shard's pieces. Padding,
    which no piece covers, is left out.

    Args:
        shard: The rank's shard.
        runs: Local tensor of the shard → run of its elements, may be empty; local tensors not listed are left out;
            another name raises KeyError.
    """
    boxes = {param: list(run_boxes(shard.params[param], run)) for param, run in runs.items()}
    pieces = []
    for piece in shard.pieces:
        stack = len(piece.offset) - len(piece.box.shape)
        local = Box(piece.offset, (1,) * stack + piece.box.shape)
        for box in boxes.get(piece.param, ()):
            if overlap := box.intersect(local):
                shift = zip(piece.box.start, overlap.start[stack:], piece.offset[stack:], strict=True)
                global_box = Box(tuple(a + b - c for a, b, c in shift), overlap.shape[stack:])
                pieces.append(
                    FlatPiece(
                        piece.tensor, global_box, piece.param, flat_index(shard.params[piece.param], overlap.start)
                    )
                )
    return pieces


def flat_index(shape: tuple[int, ...], at: tuple[int, ...]) -> int:
    """Returns the flat index of the element at position `at`, in C order; 0 for a scalar. Bounds are not checked;
    another number of dimensions raises ValueError."""
    position = 0
    for size, i in zip(shape, at, strict=True):
        position = position * size + i
    return position


def strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the number of elements from an entry to the next in each dimension, in C order; () for a scalar."""
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


def _row(row: int, shape: tuple[int, ...], run: Run) -> Iterator[Box]:
    """Yields the boxes of a run within row `row`, for rows of shape `shape`."""
    if not shape:
        yield Box((row,), (1,))
        return
    for box in run_boxes(shape, run):
        yield Box((row, *box.start), (1, *box.shape))
