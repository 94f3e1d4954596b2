"""Numbers in MXFP4 (OCP Microscaling Formats 1.0): 4 bits (E2M1) each, with a power of two (E8M0) for every 32."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 32
"""Numbers with a common scale."""
BLOCK_BYTES = BLOCK // 2
_BIAS = 127
"""Exponent of a scale of 1."""
NOT_A_NUMBER = 255
"""Scale that stands for no number."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_STRIP = 1 << 16
"""Blocks dequantised at a time; a strip needs 16 MiB."""


def dequantise(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the numbers of blocks, a new tensor [..., G · 32] on the CPU; no rounding in bfloat16 or float32.

    Args:
        blocks: uint8 [..., G, 16], on the CPU; the lower half of a byte is the number before the upper half's.
        scales: uint8 [..., G], on the CPU; `NOT_A_NUMBER` is computed as a power of two, as in transformers.
        dtype: Type of the result.
    """
    numbers = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
    byte = torch.arange(256)
    pairs = torch.stack([numbers[byte & 15], numbers[byte >> 4]], 1)
    flat, exponents = blocks.reshape(-1, BLOCK_BYTES), scales.reshape(-1, 1)
    values = torch.empty(len(flat), BLOCK, dtype=dtype)
    for first in range(0, len(flat), _STRIP):
        strip = slice(first, first + _STRIP)
        part = pairs[flat[strip].int()].view(-1, BLOCK)
        values[strip] = torch.ldexp(part, exponents[strip].int() - _BIAS)
    return values.view(*scales.shape[:-1], scales.shape[-1] * BLOCK)
