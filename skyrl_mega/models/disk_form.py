"""The order of a tensor's axes in safetensors files, for tensors that a policy and its engines hold in another order.

The global tensor, which boxes refer to, has the engines' order: a weight sync then copies whole rows. Only loading and
saving change the order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]


class DiskForm(NamedTuple):
    """The order of a tensor's axes on disk. The first axis is the same as in the global tensor."""

    axes: tuple[int, ...]
    """Axis of the global tensor at each position on disk."""
    merged: bool = False
    """True if the last two axes on disk are one."""
    packed: bool = False
    """True if an MXFP4 checkpoint has blocks and scales in place of the tensor, in the global tensor's order: the
    numbers of a block follow each other on the last axis."""

    def shape(self, shape: Shape) -> Shape:
        """Returns the shape on disk of a global tensor, or of rows of the tensor, of this shape. Ignores `packed`."""
        ordered = tuple(shape[axis] for axis in self.axes)
        return (*ordered[:-2], ordered[-2] * ordered[-1]) if self.merged else ordered

    def to_disk(self, values: Tensor) -> Tensor:
        """Returns rows (entries of the first axis) of the global tensor as a contiguous tensor in the order on disk.
        The result may share memory with `values`."""
        return values.permute(self.axes).reshape(self.shape(tuple(values.shape))).contiguous()

    def from_disk(self, values: Tensor, shape: Shape) -> Tensor:
        """Returns rows read from disk as a view with the axes of the global (unsharded) tensor.

        Args:
            values: The rows, a contiguous tensor in the order on disk.
            shape: Shape of these rows, with the axes of the global tensor.

        Raises:
            RuntimeError: `shape` has another number of elements than `values`.
        """
        ordered = values.view([shape[axis] for axis in self.axes])
        return ordered.permute([self.axes.index(axis) for axis in range(len(self.axes))])


def disk_shapes(tensors: Mapping[str, Shape], forms: Mapping[str, DiskForm]) -> dict[str, Shape]:
    """Returns name → shape on disk of global tensors; a tensor without a form has its global shape. Ignores MXFP4
    packing.

    Args:
        tensors: Name → global shape.
        forms: Name → form of tensors with reordered or merged axes on disk; names not in `tensors` are ignored.
    """
    return {name: forms[name].shape(shape) if name in forms else shape for name, shape in tensors.items()}
