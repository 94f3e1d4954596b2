"""Boxes: positions of a rank's local tensors in the model's global tensors.

A global tensor is identified by Hugging Face name and shape. A `Box` is a hyper-rectangle of a global tensor. A `Piece`
maps a box to an offset in a rank's local tensor. A `Shard` is everything that a rank holds; a `Layout` contains every
rank's shard. Fused and regrouped tensors (interleaved qkv, gate|up, w13) are simply several pieces with the same local
tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


# Tuples: a plan of a large model makes hundreds of thousands, and a frozen dataclass takes three times as long.
class Box(NamedTuple):
    """A hyper-rectangle of a tensor: `start[i] <= index[i] < start[i] + shape[i]`."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements: the product of the shape."""
        return prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """Returns the box of the elements in both boxes of the same tensor, or None if the boxes share no element; the
        order of the two does not matter.

        Raises:
            ValueError: The boxes differ in their number of dimensions.
        """
        start = tuple(max(a, b) for a, b in zip(self.start, other.start, strict=True))
        stop = tuple(
            min(a + m, b + n) for a, m, b, n in zip(self.start, self.shape, other.start, other.shape, strict=True)
        )
        shape = tuple(hi - lo for lo, hi in zip(start, stop, strict=True))
        return Box(start, shape) if all(n > 0 for n in shape) else None

    def inside(self, outer: Box) -> tuple[slice, ...]:
        """Returns the box as slices of a tensor with the elements of `outer`, which contains the box."""
        return tuple(slice(a - b, a - b + n) for a, b, n in zip(self.start, outer.start, self.shape, strict=True))

    def slices(self) -> tuple[slice, ...]:
        """Returns a slice per dimension: `tensor[box.slices()]` is the box."""
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.shape, strict=True))


class Piece(NamedTuple):
    """The position of box `box` of global tensor `tensor`: at `offset` of local tensor `param`.

    `offset` contains an entry per dimension of the local tensor. If the local tensor has more dimensions than the
    global tensor (a stack of experts), the leading offsets pick one entry each and the box fills the last dimensions.
    """

    tensor: str
    box: Box
    param: str
    offset: tuple[int, ...]


@dataclass(frozen=True)
class Shard:
    """The local tensors of a rank: shapes, and the pieces that fill the tensors.

    Local elements not covered by a piece are padding (of the vocabulary, of an expert's width), never sent or received.
    """

    params: dict[str, tuple[int, ...]]
    """Name → shape. A module may hold the tensor in another shape with as many elements, in C order: interleaved rows
    [2·F, H] are declared as [F, 2, H], so that a box is every second row (`shaped`)."""
    pieces: tuple[Piece, ...]

    def holds(self, name: str, shape: tuple[int, ...]) -> bool:
        """Returns True if a module's tensor of this shape is the local tensor `name`: it has the declared shape, or
        another number of dimensions and as many elements. Raises KeyError if the shard has no such local tensor."""
        declared = self.params[name]
        return shape == declared or (len(shape) != len(declared) and prod(shape) == prod(declared))

    def shaped(self, name: str, tensor: Tensor) -> Tensor:
        """Returns the local tensor `name` in the declared shape: `tensor` itself, or a view.

        Raises:
            ValueError: The shape is neither the declared one nor a view of it (`holds`): a part of the tensor would
                never be read or written.
            KeyError: The shard has no local tensor `name`.
        """
        declared, shape = self.params[name], tuple(tensor.shape)
        if not self.holds(name, shape):
            raise ValueError(f"{name} has the shape {shape}, but its shard declares {declared}")
        return tensor if shape == declared else tensor.view(declared)


@dataclass(frozen=True)
class Layout:
    """The distribution of all global tensors over ranks: global shapes by name, and `shards[rank]`.

    Replicas share one `Shard` object, so that hundreds of ranks cost no more than the distinct shards.
    """

    tensors: dict[str, tuple[int, ...]]
    shards: tuple[Shard, ...]

    @cached_property
    def distinct(self) -> tuple[tuple[Shard, ...], tuple[int, ...]]:
        """The distinct shard objects in order of first appearance, and for every rank the index of the rank's shard
        among them."""
        places: dict[int, int] = {}
        which = tuple(places.setdefault(id(shard), len(places)) for shard in self.shards)
        return tuple(self.shards[which.index(i)] for i in range(len(places))), which
