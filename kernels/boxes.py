"""Many small boxes of several tensors: gathered into one flat buffer of bytes, dealt out of it again, and summed up.

In torch that is a few operations for each box, and on a GPU ten thousand launches. Here the boxes become a table once,
and one launch (at most four, one for each width of a machine word) does all of them, as often as wanted. The table says
where boxes lie *relative to their tensors*: a tensor that has moved costs a new address, not a new table, and nobody's
memory is held.
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

TABLED = {"cuda"}
"""Kinds of devices on which boxes go by a table; on others one by one, by the reference."""


class Region(NamedTuple):
    """A box of a tensor, and its place in a flat buffer."""

    owner: int
    """Which tensor, counted in the order in which they are given to `Boxes`' methods."""
    at: int
    """Where the box begins: elements from the tensor's first one in memory."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """Elements."""
    dtype: torch.dtype
    """The tensor's."""
    offset: int
    """Where it begins in the flat buffer, bytes."""

    @property
    def nbytes(self) -> int:
        """Bytes of the box."""
        return prod(self.shape) * self.dtype.itemsize

    def of(self, owner: Tensor) -> Tensor:
        """The box as a view of its tensor."""
        return owner.as_strided(self.shape, self.stride, owner.storage_offset() + self.at)


def regions(views: Iterable[Tensor], offsets: Iterable[int]) -> list[Region]:
    """Each view as a box that is all of a tensor of its own."""
    return [
        Region(i, 0, tuple(view.shape), view.stride(), view.dtype, offset)
        for i, (view, offset) in enumerate(zip(views, offsets, strict=True))
    ]


def upload(array: NDArray[Any], device: torch.device) -> Tensor:
    """An array on a device. From pinned memory: from any other the host would wait for all that its stream has to do.

    A stream that waits for a peer who is gone does not end, and a wait of torch's own has no limit.
    """
    host = torch.from_numpy(array)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


class Boxes:
    """Regions of tensors, and where each lies, packed, in a flat buffer.

    Args:
        regions: What is gathered, of any dtype, shape and strides.
        device: Where the tensors and the flat buffer lie.

    Raises:
        ValueError: no regions, or one whose offset is below 0.
    """

    def __init__(self, regions: Sequence[Region], device: torch.device) -> None:
        if not regions or min(region.offset for region in regions) < 0:
            raise ValueError(f"boxes need regions with offsets of at least 0, not {list(regions)[:8]}")
        self.regions, self.device = tuple(regions), device
        self.nbytes = max(region.offset + region.nbytes for region in regions)
        """Bytes that the flat buffer has at least."""
        self._table = None
        if device.type in TABLED:
            from skyrl_mega.kernels.boxes_triton import Table

            self._table = Table(self.regions, device)

    @property
    def table_bytes(self) -> int:
        """Memory of the table on the device; 0 before its first use."""
        return 0 if self._table is None else self._table.nbytes

    def pack(self, owners: Sequence[Tensor], flat: Tensor) -> None:
        """Copies every box to its place in a flat buffer.

        Args:
            owners: the tensors, of the forms that the regions were made for.
            flat: uint8 [at least nbytes], contiguous, 8-byte aligned on a GPU.
        """
        self._check(flat)
        if self._table is None:
            pack_reference(self.regions, owners, flat)
        else:
            self._table.copy(owners, flat, pack=True)

    def unpack(self, owners: Sequence[Tensor], flat: Tensor) -> None:
        """Copies every box from its place in `flat`; see `pack`."""
        self._check(flat)
        if self._table is None:
            unpack_reference(self.regions, owners, flat)
        else:
            self._table.copy(owners, flat, pack=False)

    def checksums(self, owners: Sequence[Tensor]) -> Tensor:
        """`checksum.checksum` of every box where it lies: int64 [regions], on the device."""
        if self._table is None:
            return checksums_reference(self.regions, owners)
        return self._table.checksums(owners)

    def _check(self, flat: Tensor) -> None:
        if flat.dtype != torch.uint8 or flat.dim() != 1 or not flat.is_contiguous() or flat.device != self.device:
            raise ValueError(f"the flat buffer is contiguous uint8 [bytes] on {self.device}")
        if flat.numel() < self.nbytes:
            raise ValueError(f"the flat buffer has {flat.numel()} bytes, the boxes need {self.nbytes}")


def pack_reference(regions: Sequence[Region], owners: Sequence[Tensor], flat: Tensor) -> None:
    """One copy for each box."""
    for region in regions:
        box, place = region.of(owners[region.owner]), flat[region.offset : region.offset + region.nbytes]
        if place.storage_offset() % region.dtype.itemsize:  # cannot be seen as the box's type
            place.copy_(box.contiguous().view(-1).view(torch.uint8))
        else:
            place.view(region.dtype).view(region.shape).copy_(box)


def unpack_reference(regions: Sequence[Region], owners: Sequence[Tensor], flat: Tensor) -> None:
    """One copy for each box."""
    for region in regions:
        place = flat[region.offset : region.offset + region.nbytes]
        if place.storage_offset() % region.dtype.itemsize:
            place = place.clone()
        region.of(owners[region.owner]).copy_(place.view(region.dtype).view(region.shape))


def checksums_reference(regions: Sequence[Region], owners: Sequence[Tensor]) -> Tensor:
    """One checksum after the other."""
    found = [checksum.checksum(region.of(owners[region.owner])) for region in regions]
    return torch.from_numpy(np.array(found, np.uint64).view(np.int64)).to(owners[0].device)
