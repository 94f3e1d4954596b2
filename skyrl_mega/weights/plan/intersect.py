"""The boxes moved by a plan, each inside a single piece of every rank holding or wanting the box.

`cut` overlays the boxes of two layouts, tensor by tensor, and keeps the cells of the resulting grid. Thousands of
tensors are cut alike (an expert's, layer after layer), so the geometry is computed once for each pattern and the rest
is array arithmetic.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from skyrl_mega.parallel.box import Box, Layout, Shard

Ints = NDArray[np.int64]
Bits = NDArray[np.uint64]
"""Sets of shards: a set per row, 64 shards per word."""

Scalar = TypeVar("Scalar", bound=np.generic)

SLAB_ROWS = 128
"""Large boxes are cut at multiples of this many rows if possible, to keep blocks of a quantised tensor whole."""


class Place(NamedTuple):
    """A part's position in a local parameter."""

    param: str
    """Local name of the parameter."""
    offset: tuple[int, ...]
    """Start of the part in each dimension of the parameter, as in `Piece`; the part fills the last dimensions."""


@dataclass(frozen=True)
class TransferTable:
    """A table of boxes, in an order shared by all processes: by tensor, then by position."""

    tensors: dict[str, tuple[int, ...]]
    """Global shapes by name; `tensor` contains indices into this dict."""
    tensor: Ints
    """Tensor index of each part, [parts]."""
    start: Ints
    """Start of each part, [parts, axes]; 0 for axes beyond the tensor's."""
    shape: Ints
    """Shape of each part, [parts, axes]; 1 for axes beyond the tensor's."""
    nbytes: Ints
    """Bytes of each part on the wire, [parts]."""

    def __len__(self) -> int:
        return len(self.tensor)

    def boxes(self, wanted: Ints) -> list[tuple[str, Box]]:
        """Returns the tensor name and the box of each part whose index is in `wanted`, in that order."""
        names, shapes = list(self.tensors), list(self.tensors.values())
        named_boxes = []
        rows = (self.tensor[wanted].tolist(), self.start[wanted].tolist(), self.shape[wanted].tolist())
        for tensor, start, shape in zip(*rows, strict=True):
            axes = len(shapes[tensor])
            named_boxes.append((names[tensor], Box(tuple(start[:axes]), tuple(shape[:axes]))))
        return named_boxes

    def locate(self, shard: Shard, wanted: Ints) -> list[list[Place]]:
        """Returns, for each part whose index is in `wanted`, its places in the local parameters of a shard: one for
        every piece containing the part, in shard order.

        Each call tabulates the shard, so a single call for all parts of a process is far cheaper than a call per
        route.

        Raises:
            ValueError: The shard lacks a part; names the tensor.
        """
        axes = self.start.shape[1]
        rows = _rows(shard, {name: i for i, name in enumerate(self.tensors)}, axes)
        order = np.argsort(rows[:, 0], kind="stable")
        rows = rows[order]
        tensor = self.tensor[wanted]
        first, last = (np.searchsorted(rows[:, 0], tensor, side) for side in ("left", "right"))
        part = np.repeat(np.arange(len(wanted)), last - first)
        ends = np.cumsum(last - first)
        row = np.arange(len(part)) - np.repeat(ends - (last - first), last - first) + np.repeat(first, last - first)
        start, shape = self.start[wanted][part], self.shape[wanted][part]
        low = rows[row, 1 : 1 + axes]
        inside = ((low <= start) & (start + shape <= low + rows[row, 1 + axes :])).all(1)
        places_of: list[list[Place]] = [[] for _ in range(len(wanted))]
        shift = (start - low)[inside].tolist()
        for p, r, by in zip(part[inside].tolist(), order[row[inside]].tolist(), shift, strict=True):
            piece = shard.pieces[r]
            stack = len(piece.offset) - len(piece.box.start)
            inner = (a + b for a, b in zip(piece.offset[stack:], by, strict=False))
            places_of[p].append(Place(piece.param, (*piece.offset[:stack], *inner)))
        for p, places in enumerate(places_of):
            if not places:
                ((name, box),) = self.boxes(wanted[p : p + 1])
                raise ValueError(f"{name}: the shard has no piece with {box}")
        return places_of


@dataclass(frozen=True)
class TransferClasses:
    """Parts grouped by possible senders and by receivers: all parts of a class agree in both."""

    parts: TransferTable
    kind: Ints
    """Class of each part, [parts]."""
    holders: NDArray[np.bool_]
    """True if a source rank holds the class, [classes, source ranks]."""
    takers: NDArray[np.bool_]
    """True if a target rank wants the class, [classes, target ranks]."""


def cut(source: Layout, target: Layout, itemsize: Sequence[int], slab_bytes: int) -> TransferClasses:
    """Returns the parts that the target wants, of at most `slab_bytes` each (at least one row), grouped by equal
    holders and receivers.

    Args:
        source: Layout of the holders.
        target: Layout of the receivers.
        itemsize: Bytes of an element as sent, for each tensor of `target` in order.
        slab_bytes: Maximum size of a part.

    Raises:
        ValueError: The source lacks a box, or the layouts disagree about a shape; names the tensor.
    """
    shapes = list(target.tensors.values())
    axes = max((len(shape) for shape in shapes), default=0)
    index = {name: i for i, name in enumerate(target.tensors)}
    held, wanted = _DistinctBoxes.of(source, index, axes), _DistinctBoxes.of(target, index, axes)
    tensors_by_pattern: dict[tuple[bytes, bytes, int], list[int]] = defaultdict(list)
    for i, name in enumerate(target.tensors):
        wanted_boxes = wanted.boxes[wanted.first[i] : wanted.first[i + 1]]
        if not len(wanted_boxes):
            continue
        if source.tensors.get(name) != shapes[i]:
            raise ValueError(f"{name}: shape {source.tensors.get(name)} in the source, {shapes[i]} in the target")
        held_boxes = held.boxes[held.first[i] : held.first[i + 1]]
        tensors_by_pattern[held_boxes.tobytes(), wanted_boxes.tobytes(), itemsize[i]].append(i)
    columns: list[tuple[Ints, ...]] = []
    sets: list[Bits] = []
    for (_, _, size), members in tensors_by_pattern.items():
        tensors = np.array(members)
        held_boxes, wanted_boxes = (
            side.boxes[side.first[members[0]] : side.first[members[0] + 1]] for side in (held, wanted)
        )
        start, shape, in_held, in_wanted = _cells(held_boxes, wanted_boxes, axes, slab_bytes // size)
        if not in_held.any(1).all():
            _raise_uncovered(target, members[0], wanted_boxes, in_wanted[~in_held.any(1)][0], wanted)
        n, cells = len(tensors), len(start)
        columns.append((np.repeat(tensors, cells), np.tile(start, (n, 1)), np.tile(shape, (n, 1))))
        unions = [_union_over_boxes(side, tensors, inside) for side, inside in ((held, in_held), (wanted, in_wanted))]
        sets.append(np.concatenate(unions, axis=2).reshape(n * cells, -1))
    if not columns:
        nothing = np.zeros((0, axes), np.int64)
        parts = TransferTable(target.tensors, np.zeros(0, np.int64), nothing, nothing, np.zeros(0, np.int64))
        return TransferClasses(parts, parts.tensor, *(np.zeros((0, len(x.shards)), bool) for x in (source, target)))
    tensor, start, shape = (np.concatenate(column) for column in zip(*columns, strict=True))
    order = np.argsort(tensor, kind="stable")
    tensor, start, shape = tensor[order], start[order], shape[order]
    nbytes = shape.prod(1) * np.asarray(itemsize, np.int64)[tensor]
    kinds, kind = unique_rows(np.concatenate(sets)[order])
    words = held.bits.shape[1]
    return TransferClasses(
        TransferTable(target.tensors, tensor, start, shape, nbytes),
        kind,
        _ranks(kinds[:, :words], source),
        _ranks(kinds[:, words:], target),
    )


def unique_rows(rows: NDArray[Scalar]) -> tuple[NDArray[Scalar], Ints]:
    """Returns the distinct rows in lexicographic order, and for every given row the index of its equal among these."""
    order = np.lexsort(rows.T[::-1])
    ordered = rows[order]
    new = np.ones(len(rows), bool)
    new[1:] = (ordered[1:] != ordered[:-1]).any(1)
    which = np.empty(len(rows), np.int64)
    which[order] = np.cumsum(new) - 1
    return ordered[new], which


@dataclass(frozen=True)
class _DistinctBoxes:
    """The distinct boxes of a layout, sorted by tensor, and the distinct shards holding each box."""

    boxes: Ints
    """Start and shape of each box, [boxes, start then shape]."""
    first: Ints
    """Index of each tensor's first box, [tensors + 1]."""
    bits: Bits
    """Shards holding each box, [boxes, words]."""

    @classmethod
    def of(cls, layout: Layout, index: dict[str, int], axes: int) -> _DistinctBoxes:
        shards, _ = layout.distinct
        tables = [_rows(shard, index, axes) for shard in shards]
        rows, which = unique_rows(np.concatenate([np.zeros((0, 1 + 2 * axes), np.int64), *tables]))
        owner = np.repeat(np.arange(len(shards)), [len(table) for table in tables])
        bits = np.zeros((len(rows), -(-len(shards) // 64)), np.uint64)
        np.bitwise_or.at(bits, (which, owner // 64), np.uint64(1) << (owner % 64).astype(np.uint64))
        first = np.searchsorted(rows[:, 0], np.arange(len(index) + 1))
        return cls(np.ascontiguousarray(rows[:, 1:]), first, bits)


def _rows(shard: Shard, index: dict[str, int], axes: int) -> Ints:
    """Returns a shard's pieces as rows (tensor, start, shape), in shard order; tensor is -1 for unknown names."""
    zeros, ones = (0,) * axes, (1,) * axes
    pieces, places = shard.pieces, dict[Box, int]()  # thousands of pieces are the same few boxes
    tensor = np.fromiter((index.get(piece.tensor, -1) for piece in pieces), np.int64, len(pieces))
    place = np.fromiter((places.setdefault(piece.box, len(places)) for piece in pieces), np.int64, len(pieces))
    boxes = [(*b.start, *zeros[len(b.start) :], *b.shape, *ones[len(b.start) :]) for b in places]
    return np.concatenate([tensor[:, None], np.array(boxes, np.int64).reshape(-1, 2 * axes)[place]], axis=1)


def _cells(held: Ints, wanted: Ints, axes: int, room: int) -> tuple[Ints, Ints, NDArray[np.bool_], NDArray[np.bool_]]:
    """Returns the wanted cells of the grid formed by all edges of two lists of boxes.

    Returns:
        Start and shape [cells, axes], and masks of the boxes containing each cell [cells, held], [cells, wanted]. A
        cell of more than `room` elements is cut into slabs.
    """
    low = np.concatenate([held, wanted])[:, :axes]
    high = low + np.concatenate([held, wanted])[:, axes:]
    edges = [np.unique(np.concatenate([low[:, axis], high[:, axis]])) for axis in range(axes)]
    start = np.stack(np.meshgrid(*(e[:-1] for e in edges), indexing="ij"), -1).reshape(-1, axes)
    stop = np.stack(np.meshgrid(*(e[1:] for e in edges), indexing="ij"), -1).reshape(-1, axes)
    taken = _inside(start, stop, wanted, axes).any(1)
    slabs = [s for a, z in zip(start[taken], stop[taken], strict=True) for s in _slabs(a, z, room)]
    start, stop = (np.array(column).reshape(-1, axes) for column in zip(*slabs, strict=True))
    return start, stop - start, _inside(start, stop, held, axes), _inside(start, stop, wanted, axes)


def _slabs(start: Ints, stop: Ints, room: int) -> list[tuple[Ints, Ints]]:
    """Cuts a box along the first axis longer than 1 into slabs of at most `room` elements (at least one row)."""
    shape = stop - start
    if prod(shape.tolist()) <= room:
        return [(start, stop)]
    axis = int(np.argmax(shape > 1))
    step = max(1, room // prod(shape[axis + 1 :].tolist()))
    step -= step % SLAB_ROWS if step > SLAB_ROWS else 0
    cuts = []
    for at in range(int(start[axis]), int(stop[axis]), step):
        a, z = start.copy(), stop.copy()
        a[axis], z[axis] = at, min(at + step, int(stop[axis]))
        cuts.append((a, z))
    return cuts


def _inside(start: Ints, stop: Ints, boxes: Ints, axes: int) -> NDArray[np.bool_]:
    """Returns a mask [cells, boxes], True if the cell lies in the box."""
    low, high = boxes[:, :axes], boxes[:, :axes] + boxes[:, axes:]
    return np.all((start[:, None] >= low) & (stop[:, None] <= high), axis=2)


def _union_over_boxes(side: _DistinctBoxes, tensors: Ints, inside: NDArray[np.bool_]) -> Bits:
    """Returns the shards holding each cell [tensors, cells, words], united over all boxes containing the cell."""
    bits = [
        np.bitwise_or.reduce(side.bits[side.first[tensors][:, None] + np.flatnonzero(cell)], axis=1) for cell in inside
    ]
    return np.stack(bits, 1)


def _ranks(bits: Bits, layout: Layout) -> NDArray[np.bool_]:
    """Returns a mask [sets, ranks], True if the rank's shard is in the set."""
    which = np.array(layout.distinct[1])
    return (bits[:, which // 64] >> (which % 64).astype(np.uint64) & np.uint64(1)).astype(bool)


def _raise_uncovered(
    target: Layout, tensor: int, boxes: Ints, inside: NDArray[np.bool_], wanted: _DistinctBoxes
) -> None:
    """Raises ValueError for a box not covered by the source; names the box and a wanting target rank."""
    which = int(np.argmax(inside))
    name, axes = list(target.tensors)[tensor], len(list(target.tensors.values())[tensor])
    half = boxes.shape[1] // 2
    box = Box(tuple(boxes[which, :axes].tolist()), tuple(boxes[which, half : half + axes].tolist()))
    row = wanted.bits[wanted.first[tensor] + which][None]
    rank = int(np.argmax(_ranks(row, target)[0]))
    raise ValueError(f"{name}: the source holds no copy of {box}, which target rank {rank} wants")
