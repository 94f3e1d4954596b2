"""The bucket's ends: boxes of local parameters, copied into a flat buffer of bytes and out of it."""

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
"""What is quantised at a time: conversion needs extra memory of this many elements, of 4 bytes on a CPU."""


def local_view(param: Tensor, offset: tuple[int, ...], box: Box) -> Tensor:
    """The part of a local parameter that holds `box`."""
    stack = len(offset) - len(box.shape)
    inner = tuple(slice(a, a + n) for a, n in zip(offset[stack:], box.shape, strict=True))
    index: Any = (*offset[:stack], *inner)
    return param[index]


def region(
    owner: int, param: Tensor, offset: tuple[int, ...], start: tuple[int, ...], shape: tuple[int, ...], place: int
) -> Region:
    """A box of a local parameter that begins `start` behind `offset`, and lies at byte `place` of a bucket."""
    stack, strides = len(offset) - len(shape), param.stride()
    at = sum(o * step for o, step in zip(offset, strides, strict=True))
    at += sum(a * step for a, step in zip(start, strides[stack:], strict=True))
    return Region(owner, at, shape, strides[stack:], param.dtype, place)


@dataclass(frozen=True, slots=True)
class View:
    """A part of a local parameter, and its place in a bucket. It holds no memory."""

    region: Region
    dtype: torch.dtype
    """On the wire."""
    scale: Region | None
    """Scales of the blocks touched, [I, J], where this end converts between FP8 and another type."""
    start: tuple[int, ...]
    """Of the box, in the global tensor."""

    @property
    def plain(self) -> bool:
        """Whether the part is on the wire what it is in the parameter."""
        return self.scale is None and self.region.dtype == self.dtype

    def local(self, params: Sequence[Tensor]) -> Tensor:
        """The part where it lies."""
        return self.region.of(params[self.region.owner])

    def packed(self, flat: Tensor) -> Tensor:
        """The part in the bucket, in the wire's type."""
        return flat[self.region.offset : self.region.offset + self.nbytes].view(self.dtype).view(self.region.shape)

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return prod(self.region.shape) * self.dtype.itemsize


class BucketViews:
    """All views of one bucket at one end: those that only copy, in one launch on a GPU, and those that convert.

    Holds no parameter, and serves as long as the parameters keep their form: `params` of every method are those of
    `names`, in order, wherever they lie.

    Args:
        views: the bucket's parts, in its order.
        names: the parameters that they are parts of.
        params: these parameters.
        device: where buckets lie. Parts of parameters that lie elsewhere are copied one by one.
    """

    def __init__(
        self, views: Sequence[View], names: Sequence[str], params: Sequence[Tensor], device: torch.device
    ) -> None:
        self.views, self.names = tuple(views), tuple(names)
        here = [param.device == device for param in params]
        alone = [not (view.plain and here[view.region.owner]) for view in views]
        together = [view.region for view, apart in zip(views, alone, strict=True) if not apart]
        rest = [view for view, apart in zip(views, alone, strict=True) if apart]
        self.copies = [view for view in rest if view.scale is None]
        self.conversions = [view for view in rest if view.scale is not None]
        self._rest = rest
        self._boxes = Boxes(together, device) if together else None
        # What checksums are of, in the bucket's order; the bucket is one more tensor beside the parameters.
        summed = [_in_bucket(v, len(params)) if apart else v.region for v, apart in zip(views, alone, strict=True)]
        self._summed = Boxes(summed, device) if rest else self._boxes
        self._order: Tensor | None = None
        if together and rest:  # from those that only copy, then the others, to the bucket's order
            self._order = upload(np.argsort(np.argsort(alone, kind="stable")), device)

    @property
    def table_bytes(self) -> int:
        """Memory of the tables on the device."""
        return sum(boxes.table_bytes for boxes in {self._boxes, self._summed} if boxes is not None)

    def pack(self, params: Sequence[Tensor], flat: Tensor) -> None:
        """Parameters → bucket, those that are as they are on the wire or nearly."""
        if self._boxes is not None:
            self._boxes.pack(params, flat)
        for view in self.copies:
            view.packed(flat).copy_(view.local(params))

    def unpack(self, params: Sequence[Tensor], flat: Tensor) -> None:
        """Bucket → parameters, likewise."""
        if self._boxes is not None:
            self._boxes.unpack(params, flat)
        for view in self.copies:
            view.local(params).copy_(view.packed(flat))

    def quantise(self, params: Sequence[Tensor], flat: Tensor) -> None:
        """Parameters → E4M3 in the bucket."""
        for view in self.conversions:
            packed, local = view.packed(flat), view.local(params)
            for rows, scale, row, column in _strips(view, params):
                packed[rows].copy_(quantise(local[rows], scale, row, column))

    def dequantise(self, params: Sequence[Tensor], flat: Tensor) -> None:
        """E4M3 in the bucket → parameters."""
        for view in self.conversions:
            _dequantise(view, params, flat, view.local(params))

    def checksums(self, params: Sequence[Tensor], flat: Tensor) -> Tensor:
        """Of every part as it is on the wire, int64 [views]: of what lies in the parameter, or, where that is of
        another type, of what lies in the bucket. One launch on a GPU.
        """
        assert self._summed is not None  # a bucket has parts
        return self._summed.checksums([*params, flat] if self._rest else params)

    def unlike(self, params: Sequence[Tensor], flat: Tensor, sent: Tensor) -> Tensor:
        """Whether each part is in the parameter otherwise than it was sent: bool [views], on the device.

        Args:
            sent: its sender's checksums, int64 [views].
        """
        different = self.checksums(params, flat) != sent
        if not self._rest:
            return different
        changed = torch.stack([_unlike(view, params, flat).to(flat.device) for view in self._rest])
        if self._order is not None:
            changed = torch.cat([changed.new_zeros(len(self.views) - len(self._rest)), changed])[self._order]
        return different | changed


def _in_bucket(view: View, owner: int) -> Region:
    """A part as it lies in the bucket, which is tensor `owner`."""
    return Region(owner, view.region.offset, (view.nbytes,), (1,), torch.uint8, view.region.offset)


def _unlike(view: View, params: Sequence[Tensor], flat: Tensor) -> Tensor:
    """Whether a parameter that has not the wire's type holds anything but what the bucket's values become in it."""
    local = view.local(params)
    if view.scale is None:
        expected = view.packed(flat).to(local.device, local.dtype)
    else:
        expected = torch.empty_like(local)
        _dequantise(view, params, flat, expected)
    return (local.nan_to_num() != expected.nan_to_num()).any()


def _dequantise(view: View, params: Sequence[Tensor], flat: Tensor, local: Tensor) -> None:
    packed = view.packed(flat)
    for rows, scale, row, column in _strips(view, params):
        local[rows].copy_(dequantise(packed[rows], scale, row, column, local.dtype))


def _strips(view: View, params: Sequence[Tensor]) -> list[tuple[slice, Tensor, int, int]]:
    """Whole rows of blocks, a bounded number of elements at a time: rows, their scales, and where they begin."""
    assert view.scale is not None
    scales = view.scale.of(params[view.scale.owner])
    (rows, columns), (row, column) = view.region.shape, view.start
    step = max(1, STRIP_ELEMENTS.get(scales.device.type, 1 << 23) // (BLOCK * columns)) * BLOCK
    found = []
    at = row
    while at < row + rows:
        stop = min(row + rows, (at // step + 1) * step)
        blocks = slice(at // BLOCK - row // BLOCK, -(-stop // BLOCK) - row // BLOCK)
        found.append((slice(at - row, stop - row), scales[blocks], at, column))
        at = stop
    return found
