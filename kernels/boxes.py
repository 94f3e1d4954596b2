"""Copies and checksums of many small boxes of several tensors at once: packed into a flat byte buffer, or unpacked.

In torch each box takes a few operations, ten thousand launches on a GPU. Here the boxes become a table once, and a
single launch (at most four, one for each width of a machine word) handles all boxes, as often as needed. The table
stores positions *relative to the tensors*: a moved tensor needs a new address, not a new table, and the table keeps no
tensor alive.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from skyrl_mega.kernels import checksum

TABLE_DEVICES = {"cuda"}
"""Device types with a table of boxes; on other devices the reference handles boxes one by one."""


class Region(NamedTuple):
    """A box of a tensor, and its position in a flat buffer."""

    owner: int
    """Index of the tensor in the arguments of `Boxes`' methods."""
    at: int
    """Start of the box: elements from the tensor's first element in memory."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """Strides in elements."""
    dtype: torch.dtype
    """The tensor's dtype."""
    offset: int
    """Start of the box in the flat buffer, in bytes."""

    @property
    def nbytes(self) -> int:
        """Bytes of the box: elements · bytes of `dtype`."""
        return prod(self.shape) * self.dtype.itemsize

    def of(self, owner: Tensor) -> Tensor:
        """Returns the box as a view of the tensor `owner`."""
        return owner.as_strided(self.shape, self.stride, owner.storage_offset() + self.at)


def regions(views: Iterable[Tensor], offsets: Iterable[int]) -> list[Region]:
    """Returns a region per tensor of `views`, covering the whole tensor.

    Args:
        views: Tensors; tensor i gets owner i.
        offsets: Start of each tensor in the flat buffer, in bytes.

    Raises:
        ValueError: The numbers of tensors and offsets differ.
    """
    return [
        Region(i, 0, tuple(view.shape), view.stride(), view.dtype, offset)
        for i, (view, offset) in enumerate(zip(views, offsets, strict=True))
    ]


def upload(array: NDArray[Any], device: torch.device) -> Tensor:
    """Returns an array as a tensor on a device: on CUDA an asynchronous copy, through pinned memory; on the CPU a view
    of the array's memory.

    From other memory the host would wait for all work of the stream, without a time limit; a stream that waits for a
    vanished peer never ends.
    """
    host = torch.from_numpy(array)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


class Boxes:
    """Regions of tensors, with positions in a flat buffer.

    Args:
        regions: The boxes, of any dtype, shape and strides.
        device: Device of the tensors and the flat buffer.

    Raises:
        ValueError: There are no regions, or a region's offset is negative.
    """

    def __init__(self, regions: Sequence[Region], device: torch.device) -> None:
        if not regions or min(region.offset for region in regions) < 0:
            raise ValueError(f"boxes need regions with offsets of at least 0, not {list(regions)[:8]}")
        self.regions, self.device = tuple(regions), device
        self.nbytes = max(region.offset + region.nbytes for region in regions)
        """Minimum size of the flat buffer in bytes: the highest end of a region."""
        self._table = None
        if device.type in TABLE_DEVICES:
            from skyrl_mega.kernels.boxes_triton import Table

            self._table = Table(self.regions, device)

    @property
    def table_bytes(self) -> int:
        """Bytes of the table on the device; 0 before the first use, and always 0 on a CPU."""
        return 0 if self._table is None else self._table.nbytes

    def pack(self, owners: Sequence[Tensor], flat: Tensor) -> None:
        """Copies every box from the tensors into the flat buffer, at the box's offset.

        Args:
            owners: The tensors, in the order of `Region.owner`, with the shapes and strides described by the regions.
            flat: uint8 [at least nbytes], contiguous, 8-byte aligned on a GPU. Bytes outside of all boxes stay.

        Raises:
            ValueError: `flat` is no such buffer, or on a GPU a box is of 2³¹ words or more.
        """
        self._check(flat)
        if self._table is None:
            pack_reference(self.regions, owners, flat)
        else:
            self._table.copy(owners, flat, pack=True)

    def unpack(self, owners: Sequence[Tensor], flat: Tensor) -> None:
        """Copies every box from the flat buffer into the tensors `owners`, the reverse of `pack`; `flat` stays
        unchanged.

        Args:
            owners, flat: As for `pack`. Elements of the tensors outside of all boxes stay.

        Raises:
            ValueError: `flat` is no such buffer, or on a GPU a box is of 2³¹ words or more.
        """
        self._check(flat)
        if self._table is None:
            unpack_reference(self.regions, owners, flat)
        else:
            self._table.copy(owners, flat, pack=False)

    def checksums(self, owners: Sequence[Tensor]) -> Tensor:
        """Returns the 64-bit checksum (`checksum.checksum`) of every box in the tensors `owners`.

        Returns:
            [regions] on the device, in the order of the regions; int64 with the bits of the unsigned checksums.

        Raises:
            ValueError: On a GPU a box is of 2³¹ words or more.
        """
        if self._table is None:
            return checksums_reference(self.regions, owners)
        return self._table.checksums(owners)

    def _check(self, flat: Tensor) -> None:
        if flat.dtype != torch.uint8 or flat.dim() != 1 or not flat.is_contiguous() or flat.device != self.device:
            raise ValueError(f"the flat buffer is contiguous uint8 [bytes] on {self.device}")
        if flat.numel() < self.nbytes:
            raise ValueError(f"the flat buffer has {flat.numel()} bytes, the boxes need {self.nbytes}")


def pack_reference(regions: Sequence[Region], owners: Sequence[Tensor], flat: Tensor) -> None:
    """Copies every box from the tensors into the flat buffer in torch, with a copy per box, on any device; see
    `Boxes.pack`. Does not check the buffer."""
    for region in regions:
        box, target = region.of(owners[region.owner]), flat[region.offset : region.offset + region.nbytes]
        if target.storage_offset() % region.dtype.itemsize:  # not aligned for a view with the box's dtype
            target.copy_(box.contiguous().view(-1).view(torch.uint8))
        else:
            target.view(region.dtype).view(region.shape).copy_(box)


def unpack_reference(regions: Sequence[Region], owners: Sequence[Tensor], flat: Tensor) -> None:
    """Copies every box from the flat buffer into the tensors in torch, with a copy per box, on any device; see
    `Boxes.unpack`. Does not check the buffer."""
    for region in regions:
        source = flat[region.offset : region.offset + region.nbytes]
        if source.storage_offset() % region.dtype.itemsize:
            source = source.clone()
        region.of(owners[region.owner]).copy_(source.view(region.dtype).view(region.shape))


def checksums_reference(regions: Sequence[Region], owners: Sequence[Tensor]) -> Tensor:
    """Returns the checksums of all boxes as `Boxes.checksums` does, computed on the CPU, a box at a time; int64
    [regions] on the device of the tensors."""
    sums = [checksum.checksum(region.of(owners[region.owner])) for region in regions]
    return torch.from_numpy(np.array(sums, np.uint64).view(np.int64)).to(owners[0].device)
