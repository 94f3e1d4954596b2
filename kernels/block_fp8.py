"""Block-scaled FP8: E4M3 numbers with a float32 scale for every 128 × 128 block of a matrix.

The scale is called `weight_scale_inv` in checkpoints: weight ≈ number · scale. Numbers and scales are bit for bit those
of vLLM's own block quantisation of the same matrix.

A shard of a matrix may begin and end inside a block. So every function takes the shard's position in the whole matrix,
`row0` and `col0`, and works on the *blocks touched*: all global blocks that the shard has a part of, in order. Ranks
with parts of the same block take the maximum of their `block_amax` for that block. From then on each rank quantises its
own part, and the parts equal those of the whole matrix quantised at once.

Shapes: S stacked matrices (experts; the dimension may be absent), R rows, C columns, I × J blocks touched.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128
"""Rows and columns of a block."""
LARGEST = 448.0
"""The largest E4M3 number."""
SMALLEST_AMAX = 1e-4
"""Lower bound of a block's magnitude, the same as in vLLM: a block of zeros gets a scale, and no scale is denormal."""


def blocks_touched(rows: int, columns: int, row0: int = 0, col0: int = 0) -> tuple[int, int]:
    """Returns (I, J), the numbers of rows and of columns of blocks touched by a shard [rows, columns] that begins at
    row `row0` and column `col0` of the whole matrix. A shard of 0 rows touches 1 row of blocks if its start is inside a
    block, else 0; the same for columns."""
    return _touched(rows, row0), _touched(columns, col0)


def block_amax(weight_SRC: Tensor, row0: int = 0, col0: int = 0) -> Tensor:
    """Returns the largest magnitude in the shard's part of every block touched; NaN for a part with NaN.

    Args:
        weight_SRC: bfloat16, float16 or float32, [R, C] or [S, R, C], any strides.
        row0, col0: Position of the shard in the whole matrix.

    Returns:
        float32, [I, J] or [S, I, J], on the weight's device.

    Raises:
        ValueError: The weight is empty, or neither 2- nor 3-dimensional.
    """
    _check(weight_SRC)
    if weight_SRC.is_cuda:
        from skyrl_mega.kernels import block_fp8_triton

        return block_fp8_triton.block_amax(weight_SRC, row0, col0)
    return block_amax_reference(weight_SRC, row0, col0)


def scales(amax: Tensor) -> Tensor:
    """Returns the scales of blocks from their largest magnitudes: max(amax, `SMALLEST_AMAX`) / 448, a new float32
    tensor of the same shape. NaN stays NaN."""
    return amax.clamp(min=SMALLEST_AMAX) / LARGEST


def quantise(weight_SRC: Tensor, scales_SIJ: Tensor, row0: int = 0, col0: int = 0) -> Tensor:
    """Returns weight / scale for every element of the shard, in E4M3, rounded to nearest even. A quotient beyond E4M3's
    range, from scales of another matrix, becomes NaN.

    Args:
        weight_SRC: bfloat16, float16 or float32, [R, C] or [S, R, C], any strides.
        scales_SIJ: float32 `scales` of the blocks touched, from the magnitudes of the whole blocks.
        row0, col0: Position of the shard in the whole matrix.

    Returns:
        float8_e4m3fn, contiguous, of the weight's shape.

    Raises:
        ValueError: The weight is empty or neither 2- nor 3-dimensional, or the shape of the scales does not match the
            blocks touched.
    """
    _check(weight_SRC, scales_SIJ, row0, col0)
    if weight_SRC.is_cuda:
        from skyrl_mega.kernels import block_fp8_triton

        return block_fp8_triton.quantise(weight_SRC, scales_SIJ, row0, col0)
    return quantise_reference(weight_SRC, scales_SIJ, row0, col0)


def dequantise(
    numbers_SRC: Tensor, scales_SIJ: Tensor, row0: int = 0, col0: int = 0, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Returns `numbers · scale` in `dtype`, contiguous, of the numbers' shape; the reverse of `quantise` up to
    rounding.

    Args:
        numbers_SRC: float8_e4m3fn, [R, C] or [S, R, C].
        scales_SIJ: float32 scales of the blocks touched.
        row0, col0: Position of the shard in the whole matrix.
        dtype: Dtype of the result.

    Raises:
        ValueError: The numbers are empty or neither 2- nor 3-dimensional, or the shape of the scales does not match the
            blocks touched.
    """
    _check(numbers_SRC, scales_SIJ, row0, col0)
    if numbers_SRC.is_cuda:
        from skyrl_mega.kernels import block_fp8_triton

        return block_fp8_triton.dequantise(numbers_SRC, scales_SIJ, row0, col0, dtype)
    return dequantise_reference(numbers_SRC, scales_SIJ, row0, col0, dtype)


def block_amax_reference(weight_SRC: Tensor, row0: int = 0, col0: int = 0) -> Tensor:
    """Computes the result of `block_amax` in torch on any device, a row of blocks at a time: S·128·C elements of extra
    memory. Does not check the arguments."""
    rows, columns = weight_SRC.shape[-2:]
    stack = weight_SRC.shape[:-2]
    of_column = _block_of(columns, col0, weight_SRC.device).expand(*stack, columns)
    amax = weight_SRC.new_zeros((*stack, *blocks_touched(rows, columns, row0, col0)), dtype=torch.float32)
    for i, strip in enumerate(_strips(rows, row0)):
        by_column = weight_SRC[..., strip, :].abs().amax(-2).float()
        amax[..., i, :].scatter_reduce_(-1, of_column, by_column, "amax")
    return amax


def quantise_reference(weight_SRC: Tensor, scales_SIJ: Tensor, row0: int = 0, col0: int = 0) -> Tensor:
    """Computes the result of `quantise` in torch on any device, a row of blocks at a time: twice S·128·C float32 of
    extra memory. Does not check the arguments."""
    of_column = _block_of(weight_SRC.shape[-1], col0, weight_SRC.device)
    inverse = 1.0 / scales_SIJ  # multiplication by the inverse: vLLM's rounding
    numbers = torch.empty(weight_SRC.shape, dtype=torch.float8_e4m3fn, device=weight_SRC.device)
    for i, strip in enumerate(_strips(weight_SRC.shape[-2], row0)):
        factor = inverse[..., i, :].index_select(-1, of_column).unsqueeze(-2)
        numbers[..., strip, :] = (weight_SRC[..., strip, :].float() * factor).to(torch.float8_e4m3fn)
    return numbers


def dequantise_reference(
    numbers_SRC: Tensor, scales_SIJ: Tensor, row0: int = 0, col0: int = 0, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Computes the result of `dequantise` in torch on any device, a row of blocks at a time: twice S·128·C float32 of
    extra memory. Does not check the arguments."""
    of_column = _block_of(numbers_SRC.shape[-1], col0, numbers_SRC.device)
    weight = torch.empty(numbers_SRC.shape, dtype=dtype, device=numbers_SRC.device)
    for i, strip in enumerate(_strips(numbers_SRC.shape[-2], row0)):
        factor = scales_SIJ[..., i, :].index_select(-1, of_column).unsqueeze(-2)
        weight[..., strip, :] = (_decoded(numbers_SRC[..., strip, :]) * factor).to(dtype)
    return weight


def _decoded(numbers: Tensor) -> Tensor:
    """Returns E4M3 numbers in float32."""
    # torch converts a number at a time on a CPU; looking up the 256 values takes a quarter of the time.
    table = torch.arange(256, dtype=torch.uint8, device=numbers.device).view(torch.float8_e4m3fn).float()
    return table.index_select(0, numbers.view(torch.uint8).flatten().int()).view(numbers.shape)


def _touched(length: int, start: int) -> int:
    return -(-(start % BLOCK + length) // BLOCK)


def _block_of(columns: int, col0: int, device: torch.device) -> Tensor:
    """Returns the index of each column's block among the blocks touched, int64 [C]."""
    return (torch.arange(columns, device=device) + col0 % BLOCK) // BLOCK


def _strips(rows: int, row0: int) -> list[slice]:
    """Returns the shard's rows as slices, cut at the block boundaries of the whole matrix."""
    inside = row0 % BLOCK
    return [slice(max(0, i * BLOCK - inside), min(rows, (i + 1) * BLOCK - inside)) for i in range(_touched(rows, row0))]


def _check(weight: Tensor, scales_SIJ: Tensor | None = None, row0: int = 0, col0: int = 0) -> None:
    if weight.dim() not in (2, 3) or not weight.numel():
        raise ValueError(
            f"a weight is [rows, columns] or [stack, rows, columns] and not empty, not {list(weight.shape)}"
        )
    if scales_SIJ is None:
        return
    rows, columns = weight.shape[-2:]
    expected = (*weight.shape[:-2], *blocks_touched(rows, columns, row0, col0))
    if scales_SIJ.shape != expected:
        raise ValueError(
            f"scales are {list(scales_SIJ.shape)}; a weight {list(weight.shape)} that begins at row {row0}, column "
            f"{col0} touches blocks {list(expected)}"
        )
