"""Boxes: where a rank's local tensors lie in the model's global tensors.

A tensor has one global identity, its Hugging Face name and shape. A `Box` is a hyper-rectangle of it. A `Piece` says
that a box lies at some offset of a rank's local tensor; a `Shard` is all that one rank holds; a `Layout` is every
rank's shard. Fused and regrouped tensors (interleaved qkv, gate|up, w13) are only several pieces with the same local
tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod


@dataclass(frozen=True, slots=True)
class Box:
    """A hyper-rectangle of a tensor: `start[i] <= index[i] < start[i] + shape[i]`."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements inside."""
        return prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """The common part, or None when there is none."""
        start = tuple(max(a, b) for a, b in zip(self.start, other.start, strict=True))
        stop = tuple(
            min(a + m, b + n) for a, m, b, n in zip(self.start, self.shape, other.start, other.shape, strict=True)
        )
        shape = tuple(hi - lo for lo, hi in zip(start, stop, strict=True))
        return Box(start, shape) if all(n > 0 for n in shape) else None

    def slices(self) -> tuple[slice, ...]:
        """The box as an index of the tensor it is a part of."""
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.shape, strict=True))


@dataclass(frozen=True, slots=True)
class Piece:
    """Box `box` of global tensor `tensor` lies at `offset` of local tensor `param`.

    `offset` has one entry per dimension of the local tensor. Where the local tensor has more dimensions than the global
    one (a stack of experts), the leading offsets pick one entry each and the box fills the last dimensions.
    """

    tensor: str
    box: Box
    param: str
    offset: tuple[int, ...]


@dataclass(frozen=True)
class Shard:
    """What one rank holds: the shapes of its local tensors and the pieces that fill them.

    Local elements that no piece covers are padding (of the vocabulary, of an expert's width); nobody sends or receives
    them.
    """

    params: dict[str, tuple[int, ...]]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Layout:
    """Where every global tensor lies: `shards[rank]`, and the global shapes by name.

    Replicas share one `Shard` object, so that hundreds of ranks cost no more than the parts that differ.
    """

    tensors: dict[str, tuple[int, ...]]
    shards: tuple[Shard, ...]

    @cached_property
    def distinct(self) -> tuple[tuple[Shard, ...], tuple[int, ...]]:
        """The shard objects that differ, in the order of their first rank, and for every rank which one it has."""
        places: dict[int, int] = {}
        which = tuple(places.setdefault(id(shard), len(places)) for shard in self.shards)
        return tuple(self.shards[which.index(i)] for i in range(len(places))), which
