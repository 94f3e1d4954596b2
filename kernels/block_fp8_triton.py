"""The Triton kernels of `block_fp8`: one program per block touched. Results equal the torch reference bit for bit.

E4M3 is read and written as bytes with integer arithmetic. So the kernels need no FP8 hardware, and round the same on
every GPU and in Triton's interpreter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from skyrl_mega.kernels.block_fp8 import BLOCK, blocks_touched

WARPS = 8
_BLOCK: tl.constexpr = tl.constexpr(BLOCK)


def block_amax(weight_SRC: Tensor, row0: int = 0, col0: int = 0) -> Tensor:
    """Computes `block_fp8.block_amax` on a GPU: the largest magnitude in the shard's part of every block touched,
    float32 [I, J] or [S, I, J]. Does not check the arguments."""
    weight, rows, columns, grid = _shape(weight_SRC, row0, col0)
    amax = torch.empty(grid, dtype=torch.float32, device=weight.device)
    _amax[grid](weight, amax, rows, columns, row0 % BLOCK, col0 % BLOCK, *weight.stride(), num_warps=WARPS)
    return amax.view(*weight_SRC.shape[:-2], *grid[1:])


def quantise(weight_SRC: Tensor, scales_SIJ: Tensor, row0: int = 0, col0: int = 0) -> Tensor:
    """Computes `block_fp8.quantise` on a GPU: weight / scale in E4M3, of the weight's shape. Does not check the
    arguments."""
    weight, rows, columns, grid = _shape(weight_SRC, row0, col0)
    numbers = torch.empty(weight_SRC.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    # The division is torch's, which is exact; Triton's own is not. Without fusion the product is rounded as in torch.
    inverse = (1.0 / scales_SIJ).contiguous()
    _quantise[grid](
        weight,
        inverse,
        numbers.view(torch.uint8),
        rows,
        columns,
        row0 % BLOCK,
        col0 % BLOCK,
        *weight.stride(),
        num_warps=WARPS,
        enable_fp_fusion=False,
    )
    return numbers


def dequantise(
    numbers_SRC: Tensor, scales_SIJ: Tensor, row0: int = 0, col0: int = 0, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Computes `block_fp8.dequantise` on a GPU: number · scale in `dtype`, of the numbers' shape. Does not check the
    arguments."""
    numbers, rows, columns, grid = _shape(numbers_SRC, row0, col0)
    weight = torch.empty(numbers_SRC.shape, dtype=dtype, device=numbers.device)
    _dequantise[grid](
        numbers.view(torch.uint8),
        scales_SIJ.contiguous(),
        weight,
        rows,
        columns,
        row0 % BLOCK,
        col0 % BLOCK,
        *numbers.stride(),
        num_warps=WARPS,
        enable_fp_fusion=False,
    )
    return weight


def _shape(weight: Tensor, row0: int, col0: int) -> tuple[Tensor, int, int, tuple[int, int, int]]:
    """Returns the weight as [S, R, C], the rows, the columns, and the grid: stack × block rows × block columns."""
    stacked = weight if weight.dim() == 3 else weight.unsqueeze(0)
    rows, columns = stacked.shape[-2:]
    return stacked, rows, columns, (stacked.shape[0], *blocks_touched(rows, columns, row0, col0))


@triton.jit
def _place(rows, columns, row_in, col_in):
    """Returns this program's stack index, rows [128, 1], columns [1, 128], mask of existing elements, block index."""
    stack = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * _BLOCK - row_in + tl.arange(0, _BLOCK)[:, None]
    col = tl.program_id(2) * _BLOCK - col_in + tl.arange(0, _BLOCK)[None, :]
    inside = (row >= 0) & (row < rows) & (col >= 0) & (col < columns)
    block = (stack * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(2) + tl.program_id(2)
    return stack, row.to(tl.int64), col.to(tl.int64), inside, block


@triton.jit
def _amax(weight, amax, rows, columns, row_in, col_in, stack_stride, row_stride, col_stride):
    stack, row, col, inside, block = _place(rows, columns, row_in, col_in)
    at = weight + stack * stack_stride + row * row_stride + col * col_stride
    magnitude = tl.abs(tl.load(at, mask=inside, other=0.0).to(tl.float32))
    # As integers, magnitudes keep their order and NaN is above infinity, so NaN is propagated as in torch.
    largest = tl.max(tl.max(magnitude.to(tl.int32, bitcast=True), axis=1), axis=0)
    tl.store(amax + block, largest.to(tl.float32, bitcast=True))


@triton.jit
def _quantise(weight, inverse, numbers, rows, columns, row_in, col_in, stack_stride, row_stride, col_stride):
    stack, row, col, inside, block = _place(rows, columns, row_in, col_in)
    at = weight + stack * stack_stride + row * row_stride + col * col_stride
    scaled = tl.load(at, mask=inside, other=0.0).to(tl.float32) * tl.load(inverse + block)
    bits = scaled.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # Normal numbers: exponent bias 127 → 7, round 23 bits of mantissa to 3, ties to even.
    normal = (size - (120 << 23) + 0x7FFFF + ((size >> 20) & 1)) >> 20
    # Below 2^-6 the last of E4M3's bits is worth 2^-9, as the last of a float at 2^14 is: the sum does the rounding.
    small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - (141 << 23)
    number = tl.where(size < (121 << 23), small, normal)
    number = tl.where(size < (1087 << 20), number, 0x7F)  # 480 and more would be NaN; NaN is
    number = number | ((bits >> 24) & 0x80)
    tl.store(numbers + (stack * rows + row) * columns + col, number.to(tl.uint8), mask=inside)


@triton.jit
def _dequantise(numbers, scales, weight, rows, columns, row_in, col_in, stack_stride, row_stride, col_stride):
    stack, row, col, inside, block = _place(rows, columns, row_in, col_in)
    at = numbers + stack * stack_stride + row * row_stride + col * col_stride
    number = tl.load(at, mask=inside, other=0).to(tl.int32)
    size = number & 0x7F
    small = (size.to(tl.float32) * 0.001953125).to(tl.int32, bitcast=True)  # multiples of 2^-9
    bits = tl.where(size < 8, small, (size << 20) + (120 << 23))
    bits = tl.where(size == 0x7F, 0x7FC00000, bits) | ((number & 0x80) << 24)  # zero keeps its sign
    scaled = bits.to(tl.float32, bitcast=True) * tl.load(scales + block)
    out = weight + (stack * rows + row) * columns + col
    tl.store(out, scaled.to(weight.dtype.element_ty), mask=inside)
