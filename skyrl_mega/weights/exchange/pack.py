"""The ends of a bucket: copies of boxes between local parameters and a flat buffer of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skyrl_mega.kernels.block_fp8 import BLOCK, dequantise, quantise
from skyrl_mega.kernels.boxes import Boxes, Region, upload
from skyrl_mega.parallel.box import Box

STRIP_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 23}
"""Elements quantised at a time. Conversion needs extra memory for this many elements, 4 bytes each on a CPU."""


def local_view(param: Tensor, offset: tuple[int, ...], box: Box) -> Tensor:
    """Returns the part of a local parameter that holds `box`, as a view.

    Args:
        param: The local parameter.
        offset: Start of the box in each dimension of `param`. If `param` has more dimensions than the box (a stack of
            experts), the leading entries pick one index each.
        box: The box of the global tensor.
    """
    stack = len(offset) - len(box.shape)
    inner = tuple(slice(a, a + n) for a, n in zip(offset[stack:], box.shape, strict=True))
    index: Any = (*offset[:stack], *inner)
    return param[index]


def region(
    owner: int, param: Tensor, offset: tuple[int, ...], start: tuple[int, ...], shape: tuple[int, ...], place: int
) -> Region:
    """Returns the region of a part in a local parameter and in a bucket, for the copy kernels.

    Args:
        owner: Number of the parameter.
        param: The local parameter.
        offset: Start of the box in each dimension of `param`, as for `local_view`.
        start: Start of the part within the box.
        shape: Shape of the part.
        place: Byte offset of the part in the bucket.
    """
    stack, strides = len(offset) - len(shape), param.stride()
    at = sum(o * step for o, step in zip(offset, strides, strict=True))
    at += sum(a * step for a, step in zip(start, strides[stack:], strict=True))
    return Region(owner, at, shape, strides[stack:], param.dtype, place)


@dataclass(frozen=True, slots=True)
class BucketView:
    """A part of a local parameter and its position in a bucket. Holds no memory."""

    region: Region
    dtype: torch.dtype
    """Type on the wire."""
    scale: Region | None
    """Scales of the touched blocks, [I, J], if this end converts between FP8 and another type."""
    start: tuple[int, ...]
    """Start of the box in the global tensor."""

    @property
    def plain(self) -> bool:
        """True if the part has the same type on the wire and in the parameter, so that copying bytes is enough."""
        return self.scale is None and self.region.dtype == self.dtype

    def local(self, params: Sequence[Tensor]) -> Tensor:
        """Returns the part as a view of its parameter among `params`."""
        return self.region.of(params[self.region.owner])

    def packed(self, flat: Tensor) -> Tensor:
        """Returns the part as a view of the bucket `flat` (uint8), in the wire's type and the part's shape."""
        return flat[self.region.offset : self.region.offset + self.nbytes].view(self.dtype).view(self.region.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the part on the wire: number of elements times the size of the wire's type."""
        return prod(self.region.shape) * self.dtype.itemsize


class BucketViews:
    """All views of a bucket at one end: plain copies, in a single launch on a GPU, and conversions.

    Holds no parameter. Valid while the parameters keep type, shape, strides and device; addresses may change. In every
    method, `params` are the parameters called `names`, in order.

    Args:
        views: The bucket's parts, in order.
        names: Parameters containing the parts.
        params: Tensors of these parameters.
        device: Device of the buckets. Parts of parameters on other devices are copied individually.
    """

    def __init__(
        self, views: Sequence[BucketView], names: Sequence[str], params: Sequence[Tensor], device: torch.device
    ) -> None:
        self.views, self.names = tuple(views), tuple(names)
        on_device = [param.device == device for param in params]
        separate = [not (view.plain and on_device[view.region.owner]) for view in views]
        joint = [view.region for view, is_separate in zip(views, separate, strict=True) if not is_separate]
        separate_views = [view for view, is_separate in zip(views, separate, strict=True) if is_separate]
        self.copies = [view for view in separate_views if view.scale is None]
        self.conversions = [view for view in separate_views if view.scale is not None]
        self._separate_views = separate_views
        self._boxes = Boxes(joint, device) if joint else None
        # Regions to checksum, in bucket order; the bucket is one more tensor after the parameters.
        summed = [
            _in_bucket(v, len(params)) if is_separate else v.region
            for v, is_separate in zip(views, separate, strict=True)
        ]
        self._summed = Boxes(summed, device) if separate_views else self._boxes
        self._order: Tensor | None = None
        if joint and separate_views:  # from the order (plain copies, others) to bucket order
            self._order = upload(np.argsort(np.argsort(separate, kind="stable")), device)

    @property
    def table_bytes(self) -> int:
        """Bytes of device memory taken by the copy kernels' tables of box positions."""
        return sum(boxes.table_bytes for boxes in {self._boxes, self._summed} if boxes is not None)

    def pack(self, params: Sequence[Tensor], flat: Tensor) -> None:
        """Copies the parts from the parameters into the bucket `flat`, converted to the wire's type; except parts with
        FP8 conversion, which `quantise` writes."""
        if self._boxes is not None:
            self._boxes.pack(params, flat)
        for view in self.copies:
            view.packed(flat).copy_(view.local(params))

    def unpack(self, params: Sequence[Tensor], flat: Tensor) -> None:
        """Copies the parts from the bucket `flat` into the parameters, converted to the parameter's type; except parts
        with FP8 conversion, which `dequantise` writes."""
        if self._boxes is not None:
            self._boxes.unpack(params, flat)
        for view in self.copies:
            view.local(params).copy_(view.packed(flat))

    def quantise(self, params: Sequence[Tensor], flat: Tensor) -> None:
        """Writes the parts with FP8 conversion into the bucket `flat` as E4M3, quantised with the scales among
        `params`. All other parts are left to `pack`."""
        for view in self.conversions:
            packed, local = view.packed(flat), view.local(params)
            for rows, scale, row, column in _strips(view, params):
                packed[rows].copy_(quantise(local[rows], scale, row, column))

    def dequantise(self, params: Sequence[Tensor], flat: Tensor) -> None:
        """Dequantises the bucket's E4M3 parts into parameters of another type, with the scales among `params`. All
        other parts are left to `unpack`. `flat` is the received bucket."""
        for view in self.conversions:
            _dequantise(view, params, flat, view.local(params))

    def checksums(self, params: Sequence[Tensor], flat: Tensor) -> Tensor:
        """Returns a checksum of every part as sent on the wire, int64 [views], on the device of the buckets. The bucket
        must not be empty.

        The checksum covers the parameter's bytes, or the bucket's bytes if the parameter's type differs. Parameters and
        bucket `flat` must hold the same data already: after packing, or after unpacking.
        """
        assert self._summed is not None  # a bucket is never empty
        return self._summed.checksums([*params, flat] if self._separate_views else params)

    def mismatches(self, params: Sequence[Tensor], flat: Tensor, sent: Tensor) -> Tensor:
        """Returns a mask of the parts differing from the data sent, bool [views], on the device: True for a part with
        another checksum, or with another value after conversion to the parameter's type.

        Args:
            params: The parameters, already filled from the bucket.
            flat: The received bucket.
            sent: The sender's checksums, int64 [views].
        """
        different = self.checksums(params, flat) != sent
        if not self._separate_views:
            return different
        changed = torch.stack([_differs(view, params, flat).to(flat.device) for view in self._separate_views])
        if self._order is not None:
            changed = torch.cat([changed.new_zeros(len(self.views) - len(self._separate_views)), changed])[self._order]
        return different | changed


def _in_bucket(view: BucketView, owner: int) -> Region:
    """Returns a part's region in the bucket, with `owner` as the bucket's tensor number."""
    return Region(owner, view.region.offset, (view.nbytes,), (1,), torch.uint8, view.region.offset)


def _differs(view: BucketView, params: Sequence[Tensor], flat: Tensor) -> Tensor:
    """Returns True, as a tensor, if a parameter of another type than the wire's differs from the converted bucket
    values.
    """
    local = view.local(params)
    if view.scale is None:
        expected = view.packed(flat).to(local.device, local.dtype)
    else:
        expected = torch.empty_like(local)
        _dequantise(view, params, flat, expected)
    return (local.nan_to_num() != expected.nan_to_num()).any()


def _dequantise(view: BucketView, params: Sequence[Tensor], flat: Tensor, local: Tensor) -> None:
    packed = view.packed(flat)
    for rows, scale, row, column in _strips(view, params):
        local[rows].copy_(dequantise(packed[rows], scale, row, column, local.dtype))


def _strips(view: BucketView, params: Sequence[Tensor]) -> list[tuple[slice, Tensor, int, int]]:
    """Returns strips of whole block rows, each of bounded size: rows, scales, and the strip's start."""
    assert view.scale is not None
    scales = view.scale.of(params[view.scale.owner])
    (rows, columns), (row, column) = view.region.shape, view.start
    step = max(1, STRIP_ELEMENTS.get(scales.device.type, 1 << 23) // (BLOCK * columns)) * BLOCK
    strips = []
    at = row
    while at < row + rows:
        stop = min(row + rows, (at // step + 1) * step)
        blocks = slice(at // BLOCK - row // BLOCK, -(-stop // BLOCK) - row // BLOCK)
        strips.append((slice(at - row, stop - row), scales[blocks], at, column))
        at = stop
    return strips
