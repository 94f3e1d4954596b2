"""Weights back in the block FP8 of their source: an unchanged block keeps numbers and scale, others get new ones."""

from __future__ import annotations

import torch
from torch import Tensor

from skyrl_mega.kernels import block_fp8
from skyrl_mega.kernels.block_fp8 import BLOCK


def requantise(
    values_RC: Tensor, numbers_RC: Tensor, scales_IJ: Tensor, model: torch.dtype, powers_of_two: bool
) -> tuple[Tensor, Tensor]:
    """Quantises weights to the block FP8 of the source; returns numbers [R, C] and scales [I, J] in the source's
    types.

    A block equal to the source's block, dequantised in the model's type, keeps the source's numbers and scale. Any
    other block gets the scale largest magnitude / 448, as in vLLM, and numbers rounded to nearest even.

    Args:
        values_RC: Weights; the first row begins a row of blocks. The last row and column of blocks may be partial.
        numbers_RC: The source's E4M3 numbers of the same rows.
        scales_IJ: The source's scales of the same rows' blocks.
        model: Type of the model in training, in which the source was loaded.
        powers_of_two: True to round scales up to powers of two.
    """
    stored = scales_IJ.float()
    loaded = block_fp8.dequantise(numbers_RC, stored, dtype=model)
    changed_IJ = block_fp8.block_amax((loaded != values_RC).to(torch.bfloat16)) > 0
    scales = block_fp8.scales(block_fp8.block_amax(values_RC))
    if powers_of_two:
        fraction, exponent = torch.frexp(scales)
        scales = torch.ldexp(torch.ones_like(scales), exponent - (fraction == 0.5).int())
    scales = torch.where(changed_IJ, scales.to(scales_IJ.dtype), scales_IJ)
    numbers = block_fp8.quantise(values_RC, scales.float())
    rows, columns = values_RC.shape
    changed_RC = changed_IJ.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    as_bytes = torch.where(changed_RC, numbers.view(torch.uint8), numbers_RC.view(torch.uint8))
    return as_bytes.view(numbers.dtype), scales
