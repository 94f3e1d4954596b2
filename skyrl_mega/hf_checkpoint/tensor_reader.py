"""Reads boxes of tensors in safetensors files, in strips of bounded size; dequantises block FP8 on the way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from skyrl_mega.hf_checkpoint.box_files import CHUNK_BYTES, BoxEntry, bytes_of, opened, read_into, strips
from skyrl_mega.hf_checkpoint.index import FP8_DTYPE, MXFP4_DTYPE, TensorEntry
from skyrl_mega.kernels import block_fp8
from skyrl_mega.parallel.box import Box
from skyrl_mega.weights.fp8.format import scale_box

TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    FP8_DTYPE: torch.float8_e4m3fn,
    MXFP4_DTYPE: torch.uint8,
}
"""Types of safetensors that are read."""


class TensorReader:
    """A reader of tensors on disk; memory: a buffer of `CHUNK_BYTES`, and the strip after dequantisation.

    A larger row of a box makes the buffer larger.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def read(self, name: str, entry: TensorEntry, parts: Sequence[tuple[Box, Tensor]]) -> None:
        """Fills local tensors with boxes of a tensor on disk, converted to the local tensor's dtype.

        A matrix in block FP8 becomes `number · scale`, computed in float32 and rounded once.

        Args:
            name: Name of the tensor, for errors.
            entry: The tensor, with the scales of a matrix in block FP8.
            parts: Boxes, each with a local tensor of the box's shape on any device.

        Raises:
            Damaged: The file ends before the tensor does.
            OSError: The file cannot be opened or read.
            KeyError: The type on disk is not in `TORCH_DTYPES`.
        """
        with _opened(name, entry) as (descriptor, stored):
            scales = self._scales(name, entry) if entry.scales else None
            for box, into in parts:
                for strip in strips(box, stored.dtype.itemsize):
                    values = self._numbers(descriptor, stored, strip)
                    if scales is not None:
                        row, column = strip.start
                        at = scales[scale_box(strip).slices()]
                        values = block_fp8.dequantise(values, at, row, column, dtype=into.dtype)
                    into[strip.inside(box)].copy_(values)

    def rows(self, name: str, entry: TensorEntry, first: int, rows: int) -> Tensor:
        """Returns rows (entries of the first axis) as stored, in a view of the reader's buffer that the next call
        overwrites.

        Args:
            name: Name of the tensor, for errors.
            entry: The tensor.
            first: First row.
            rows: Number of rows.

        Raises:
            Damaged: The file ends before the rows do.
            OSError: The file cannot be opened or read.
            KeyError: The type on disk is not in `TORCH_DTYPES`.
        """
        box = Box((first, *(0,) * (len(entry.shape) - 1)), (rows, *entry.shape[1:]))
        with _opened(name, entry) as (descriptor, stored):
            return self._numbers(descriptor, stored, box)

    def fp8(self, name: str, entry: TensorEntry, first: int, rows: int) -> tuple[Tensor, Tensor]:
        """Returns rows of a matrix in block FP8 and the scales of these rows' blocks, both as stored in the files.

        Args:
            name: Name of the tensor, for errors.
            entry: The tensor, with its scales.
            first: First row, a multiple of 128.
            rows: Number of rows.

        Returns:
            The E4M3 numbers [rows, columns], a view of the reader's buffer that the next call overwrites; and the
            scales [blocks of rows, blocks of columns], a new tensor.

        Raises:
            Damaged: A file ends before the data does.
            OSError: A file cannot be opened or read.
        """
        assert entry.scales is not None
        box = Box((first, 0), (rows, entry.shape[1]))
        with _opened(name, entry) as (descriptor, stored):
            numbers = self._numbers(descriptor, stored, box)
        with _opened(name, entry.scales) as (descriptor, stored):
            scales = torch.empty(scale_box(box).shape, dtype=stored.dtype)
            read_into(descriptor, stored, scale_box(box), bytes_of(scales))
        return numbers, scales

    def _scales(self, name: str, entry: TensorEntry) -> Tensor:
        """Returns all scales of a matrix, in float32."""
        assert entry.scales is not None
        with _opened(name, entry.scales) as (descriptor, stored):
            return self._numbers(descriptor, stored, stored.box).float().clone()

    def _numbers(self, descriptor: int, stored: BoxEntry, box: Box) -> Tensor:
        """Returns a box as stored, in a view of the buffer that is valid until the next call."""
        size = box.numel * stored.dtype.itemsize
        if size > len(self._buffer):
            self._buffer = torch.empty(max(size, CHUNK_BYTES), dtype=torch.uint8)
        values = self._buffer[:size].view(stored.dtype).view(box.shape)
        read_into(descriptor, stored, box, bytes_of(values))
        return values


@contextmanager
def _opened(name: str, entry: TensorEntry) -> Iterator[tuple[int, BoxEntry]]:
    """Opens a tensor's file; yields the descriptor, and the tensor as a single box."""
    box = Box((0,) * len(entry.shape), entry.shape)
    with opened(entry.file) as descriptor:
        yield descriptor, BoxEntry(entry.file, name, box, "weight", TORCH_DTYPES[entry.dtype], entry.offset, crc=0)
