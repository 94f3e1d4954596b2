"""A 64-bit checksum of a box, independent of the box's position and strides in memory.

The bytes, in the box's own order and padded with zeros, are 64-bit words wᵢ; the checksum is Σ wᵢ · (2i + 1) · φ modulo
2⁶⁴. Every factor is odd, so any change of a single word is detected. Factors differ, so any exchange of words is
detected. The sum may be computed in any order and from parts of words: byte j of word i adds byte · 2⁸ʲ · (2i + 1) · φ.

This file is the definition, on the host; `boxes` computes the checksums of many boxes at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
import torch
from torch import Tensor

WORD = 8
PHI = 0x9E3779B97F4A7C15
COLUMNS = 4096
"""Words per row of factors."""
STRIP_BYTES = 1 << 19
"""Bytes gathered from a strided box at a time: the capacity of a cache."""
_MASK = (1 << 64) - 1


def checksum(box: Tensor) -> int:
    """Returns the checksum of a box of any dtype, shape and strides, 0 … 2⁶⁴ - 1; 0 for an empty box. Always computed
    on the CPU."""
    total, first = 0, 0
    for strip in _strips(box):
        # numpy, because torch multiplies 64-bit integers 20 times slower; a copy, because torch cannot resize storages
        # shared with numpy.
        words = strip.to("cpu", copy=True).numpy().view(np.uint64)
        whole = len(words) // COLUMNS * COLUMNS
        for block in (words[:whole].reshape(-1, COLUMNS), words[whole:].reshape(1, -1)):
            if block.size:
                sums = block.sum(1, dtype=np.uint64)
                rows = np.arange(len(block), dtype=np.uint64) * np.uint64(COLUMNS) + np.uint64(first)
                shifted = int((sums * rows).sum(dtype=np.uint64)) * 2 * PHI
                total += int((block @ _factors()[: block.shape[1]]).sum(dtype=np.uint64)) + shifted
                first += block.size
    return total & _MASK


def _strips(box: Tensor) -> Iterator[Tensor]:
    """Yields the box's words, int64, in order, some rows at a time; the last strip is padded with zeros."""
    rows = box.shape[0] if box.dim() else 1
    box = box.reshape(1) if not box.dim() else box
    row_bytes = box[0].nbytes if rows else 0
    # Eight rows are whole words, for any row size.
    step = max(WORD, STRIP_BYTES // max(1, row_bytes) // WORD * WORD)
    for at in range(0, rows, step):
        strip = box[at : at + step].contiguous().view(-1).view(torch.uint8)
        if tail := len(strip) % WORD:
            strip = torch.cat([strip, strip.new_zeros(WORD - tail)])
        yield strip.view(torch.int64) if strip.storage_offset() % WORD == 0 else strip.clone().view(torch.int64)


@cache
def _factors() -> np.ndarray:
    """Returns (2c + 1) · φ for the words of a row."""
    return (np.arange(COLUMNS, dtype=np.uint64) * np.uint64(2) + np.uint64(1)) * np.uint64(PHI)
