"""Transformer Engine's FP8 kernels in plain torch, called by its Python on a CPU.

The tensors of a quantised matrix, and the choice of tensors for a product, follow the device given to `te.install`. A
product checks that the tensors exist and that its sides meet cuBLAS's rules. Sizes and checks follow
`common/gemm/cublaslt_gemm.cu: CanonicalizeGemmInput`; positions of scales follow the quantisers' `get_scale_shape`.

Legend: R rows, C columns of a matrix, B = 128.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.cuda import te

BLOCK, MICRO = 128, 32
CPU = torch.device("cpu")
"""Device of wrapper tensors: torch reads this device itself, so a mode cannot map it."""
KINDS = {
    te.DTYPES.index("kFloat8E4M3"): torch.float8_e4m3fn,
    te.DTYPES.index("kFloat8E5M2"): torch.float8_e5m2,
}
"""torch's dtypes by Transformer Engine's numbers for dtypes."""
KERNELS: dict[str, Callable[..., Any]] = {}


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Registers a function of the compiled extension by name."""
    KERNELS[function.__name__] = function
    return function


# ---- rounding ----------------------------------------------------------------------------------------------------


def _bytes(values: Tensor, kind: torch.dtype) -> Tensor:
    """Returns the FP8 bytes of the values; larger values become the format's largest number."""
    most = torch.finfo(kind).max
    return values.clamp(-most, most).to(kind).view(torch.uint8)


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def magnitudes(x_RC: Tensor) -> Tensor:
    """Returns the largest magnitude of each block of 128 × 128, float32 [R/B, C/B]."""
    rows, columns = x_RC.shape
    whole = F.pad(x_RC.detach().float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    return whole.view(-(-rows // BLOCK), BLOCK, -(-columns // BLOCK), BLOCK).abs().amax((1, 3))


def spread(scales: Tensor, rows: int, columns: int) -> Tensor:
    """Returns the scale of every element, [R, C]."""
    return scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]


def scaled(x_RC: Tensor, scale: Tensor, kind: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """Returns x rounded with a scale for each block of 128 × 128, uint8 [R, C]."""
    return _bytes(x_RC.detach().float() * spread(scale, *x_RC.shape), kind)


def _scale(amax: Tensor, kind: torch.dtype, powers: bool = False) -> Tensor:
    """Returns the scale, largest number of the format / magnitude, rounded down to a power of two if requested."""
    scale = torch.where(amax > 0, torch.finfo(kind).max / amax, 1.0)
    return torch.ldexp(torch.ones_like(scale), torch.frexp(scale)[1] - 1) if powers else scale


def _rows(x_RC: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rounds blocks of 128 along a row. Returns uint8 [R, C] and inverse scales, float32 [C/B, R]."""
    rows, columns = x_RC.shape
    parts = F.pad(x_RC, (0, -columns % BLOCK)).view(rows, -(-columns // BLOCK), BLOCK)  # an expert may have no rows
    scale = _scale(parts.abs().amax(-1), kind)
    return _bytes(parts * scale[..., None], kind).flatten(1)[:, :columns], (1 / scale).T


def _micro(x_RC: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rounds blocks of 32 along a row. Returns uint8 [R, C] and exponents + 127, uint8 [R, C/32]."""
    parts = x_RC.unflatten(-1, (x_RC.shape[1] // MICRO, MICRO))
    fraction, exponent = torch.frexp(parts.abs().amax(-1) / torch.finfo(kind).max)
    up = (exponent - (fraction == 0.5).int()).clamp(min=-127)
    numbers = _bytes(torch.ldexp(parts, -up[..., None]), kind).view(x_RC.shape)
    return numbers, (up + 127).to(torch.uint8)


def _into(target: Tensor, values: Tensor) -> None:
    """Writes scales into a padded tensor and clears the padding."""
    target.zero_()[: values.shape[0], : values.shape[1]].copy_(values)


# ---- quantised tensors -------------------------------------------------------------------------------------------


@kernel
def create_empty_quantized_tensor(
    quantizer: Any, shape: Sequence[int], dtype: torch.dtype, _device: Any, _pinned: bool = False
) -> Any:
    """Returns an empty quantised tensor, with tensors and shapes from Transformer Engine's Python."""
    kind: Any = type(quantizer)
    specs = kind.inner_tensor_specs(quantizer, tuple(shape))
    meta = kind.storage_metadata(quantizer, dtype)
    cls, words = meta["cls"], dict(meta["nontensor_kwargs"])
    if not quantizer.internal:
        del words["fake_dtype"]
        words |= {"shape": tuple(shape), "dtype": dtype, "device": CPU}
    for name, argument in cls._INNER_TENSORS:
        size, of = specs.get(name, (None, None))
        words[argument] = None if size is None else torch.zeros(size, dtype=of, device=CPU)
    return cls(**words)


@kernel
def quantize(values: Tensor, quantizer: Any, out: Any = None, _noop: Any = None) -> Any:
    """Rounds a matrix with the quantiser's recipe into the tensors of its usages."""
    if out is None:
        out = create_empty_quantized_tensor(quantizer, values.shape, values.dtype, "cuda")
    x = values.detach().flatten(0, -2).float()
    FILL[type(quantizer).__name__](x, quantizer, KINDS[int(quantizer.dtype)], out)
    return out


def _fill_blocks(x: Tensor, quantizer: Any, kind: torch.dtype, out: Any) -> None:
    assert not quantizer.force_pow_2_scales, "NVTE_FP8_BLOCK_SCALING_FP32_SCALES was not read"
    assert not quantizer.amax_epsilon
    sides = {"rowwise": x, "columnwise": x.T}
    if quantizer.block_scaling_dim == 2:
        scale = _scale(magnitudes(x), kind)
        numbers, inverse = scaled(x, scale, kind), 1 / scale
        copies = {"rowwise": (numbers, inverse), "columnwise": (numbers.T, inverse.T)}
    else:
        copies = {side: _rows(values, kind) for side, values in sides.items()}
    for side, (numbers, inverse) in copies.items():
        data = getattr(out, f"_{side}_data")
        if data is not None:
            data.copy_(numbers.reshape(data.shape))
            _into(getattr(out, f"_{side}_scale_inv"), inverse)


def _fill_tensor(x: Tensor, quantizer: Any, kind: torch.dtype, out: Any) -> None:
    """Rounds with a single scale from the tensor; a group of ranks can share the maximum."""
    amax = x.abs().amax() if x.numel() else x.new_zeros(())
    if quantizer.with_amax_reduction:
        torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX, quantizer.amax_reduction_group)
    scale = _scale(amax, kind, quantizer.force_pow_2_scales)
    numbers = _bytes(x * scale, kind)
    if out._data is not None:
        out._data.copy_(numbers.view(out._data.shape))
    if out._transpose is not None:
        out._transpose.copy_(numbers.T.reshape(out._transpose.shape))
        out._transpose_invalid = False
    out._scale_inv.copy_((1 / scale).view(out._scale_inv.shape))


def _fill_micro(x: Tensor, quantizer: Any, kind: torch.dtype, out: Any) -> None:
    if out._rowwise_data is not None:
        numbers, exponents = _micro(x, kind)
        out._rowwise_data.copy_(numbers.view(out._rowwise_data.shape))
        _into(out._rowwise_scale_inv, exponents)
    if out._columnwise_data is not None:
        numbers, exponents = _micro(x.T.contiguous(), kind)
        out._columnwise_data.copy_(numbers.T.reshape(out._columnwise_data.shape))
        _into(out._columnwise_scale_inv, exponents.T)


FILL: dict[str, Callable[..., None]] = {
    "Float8BlockQuantizer": _fill_blocks,
    "Float8CurrentScalingQuantizer": _fill_tensor,
    "MXFP8Quantizer": _fill_micro,
}


@kernel
def split_quantize(
    values: Tensor, sizes: Sequence[int], quantizers: Sequence[Any], *, disable_bulk_allocation: bool = False
) -> list[Any]:
    """Rounds each expert's rows."""
    return [quantize(part, each) for part, each in zip(values.split(list(sizes)), quantizers, strict=True)]


@kernel
def bgrad_quantize(values: Tensor, quantizer: Any) -> tuple[Tensor, Any]:
    """Returns the bias gradient, and the rounded output gradient."""
    return values.detach().flatten(0, -2).float().sum(0).to(values.dtype), quantize(values, quantizer)


@kernel
def fp8_transpose(numbers: Tensor, _dtype: Any, out: Tensor | None = None) -> Tensor:
    """Returns the transposed bytes."""
    flat = numbers.flatten(0, -2)
    return flat.T.contiguous() if out is None else out.copy_(flat.T)


@kernel
def swap_first_dims(x: Tensor, out: Tensor) -> Tensor:
    """Writes [a, b, …] transposed to [b, a, …]."""
    return out.copy_(x.transpose(0, 1))


@kernel
def fused_multi_row_padding(x: Tensor, out: Tensor, sizes: Sequence[int], padded: Sequence[int]) -> None:
    """Copies every expert's rows and adds rows of zeros as padding."""
    for part, into in zip(x.split(list(sizes)), out.split(list(padded)), strict=True):
        into.zero_()[: len(part)].copy_(part)


@kernel
def fused_multi_row_unpadding(x: Tensor, out: Tensor, padded: Sequence[int], sizes: Sequence[int]) -> None:
    """Copies every expert's rows without the padding."""
    for part, into in zip(x.split(list(padded)), out.split(list(sizes)), strict=True):
        into.copy_(part[: len(into)])


# ---- master weights → parameters ---------------------------------------------------------------------------------


@kernel
def multi_tensor_compute_scale_and_scale_inv(
    _chunk: int, _noop: Tensor, lists: list[list[Tensor]], largest: float, powers: bool, epsilon: float
) -> None:
    """Computes common/multi_tensor/compute_scale.cu with float32 scales."""
    assert not powers and not epsilon, "scales are powers of two: NVTE_FP8_BLOCK_SCALING_FP32_SCALES was not read"
    for amax, scale, inverse in zip(*lists, strict=True):
        scale.copy_(torch.where(amax > 0, largest / amax, torch.ones(())))
        inverse.copy_(1 / scale)


@kernel
def fp8_block_scaling_compute_partial_amax(
    values: Tensor, amax: Tensor, rows: int, columns: int, start: int, block: int
) -> None:
    """Writes the contribution of a flat range to the largest magnitude of every block."""
    whole = torch.zeros(rows * columns)
    whole[start : start + values.numel()] = values.float().view(-1)
    _into(amax, magnitudes(whole.view(rows, columns)))


@kernel
def fp8_block_scaling_partial_cast(
    values: Tensor, out: Tensor, scale: Tensor, rows: int, columns: int, start: int, block: int, dtype: Any
) -> None:
    """Rounds a flat range of a matrix."""
    whole = torch.zeros(rows * columns)
    whole[start : start + values.numel()] = values.float().view(-1)
    out.copy_(scaled(whole.view(rows, columns), scale).view(-1)[start : start + values.numel()])


# ---- products ----------------------------------------------------------------------------------------------------


def shape(t: Any) -> tuple[int, ...]:
    """Returns the shape of a matrix in FP8 or another format."""
    return tuple(t.size())


def product(a: Any, transa: bool, b: Any, transb: bool) -> Tensor:
    """Returns op(b) · op(a) in row order, float32; cuBLAS counts in columns. An FP8 matrix contributes the copy that
    lies along the sum."""
    first, second = operand(a, columnwise=not transa), operand(b, columnwise=transb)
    left, right = second.T if transb else second, first.T if transa else first
    _check(a, b, m=right.shape[1], n=left.shape[0], k=left.shape[1])
    return left @ right


def operand(t: Any, columnwise: bool) -> Tensor:
    """Returns the values of a matrix, float32 [R, C], from the row-wise or the column-wise copy."""
    if hasattr(t, "_is_2D_scaled"):
        return _of_blocks(t, columnwise)
    if hasattr(t, "_with_gemm_swizzled_scales"):
        return _of_micro(t, columnwise)
    if hasattr(t, "_transpose_invalid"):
        return _of_tensor(t, columnwise)
    assert isinstance(t, Tensor)
    return t.flatten(0, -2).float()


def _numbers(data: Tensor, dtype: Any) -> Tensor:
    return data.view(KINDS[int(dtype)]).float()


def _of_blocks(t: Any, columnwise: bool) -> Tensor:
    data = t._columnwise_data if columnwise else t._rowwise_data
    inverse = t._columnwise_scale_inv if columnwise else t._rowwise_scale_inv
    assert data is not None, "missing usage"
    # A product sums along stored rows: the column-wise copy is stored transposed.
    flat = data.flatten(1) if columnwise else data.flatten(0, -2)
    numbers = _numbers(flat, t._fp8_dtype)
    rows, columns = numbers.shape
    if t._is_2D_scaled:
        values = numbers * spread(inverse, rows, columns)
    else:
        values = numbers * inverse[:, :rows].T.repeat_interleave(BLOCK, 1)[:, :columns]
    return values.T if columnwise else values


def _of_tensor(t: Any, columnwise: bool) -> Tensor:
    if columnwise and not _any_layout():
        assert t._transpose is not None and not t._transpose_invalid, "missing column-wise usage"
        return (_numbers(t._transpose.flatten(1), t._fp8_dtype) * t._scale_inv).T
    assert t._data is not None, "missing row-wise usage"
    return _numbers(t._data.flatten(0, -2), t._fp8_dtype) * t._scale_inv


def _any_layout() -> bool:
    """Returns True if FP8 products need no transposed copies, as on Blackwell."""
    from transformer_engine.pytorch.utils import is_non_tn_fp8_gemm_supported

    return bool(is_non_tn_fp8_gemm_supported())


def _of_micro(t: Any, columnwise: bool) -> Tensor:
    data = t._columnwise_data if columnwise else t._rowwise_data
    assert data is not None, "missing usage"
    numbers = _numbers(data.flatten(0, -2), t._fp8_dtype)
    rows, columns = numbers.shape
    if columnwise:
        exponents = t._columnwise_scale_inv[: rows // MICRO, :columns].repeat_interleave(MICRO, 0)
    else:
        exponents = t._rowwise_scale_inv[:rows, : columns // MICRO].repeat_interleave(MICRO, 1)
    return torch.ldexp(numbers, exponents.int() - 127)


def _check(a: Any, b: Any, m: int, n: int, k: int) -> None:
    """Checks cuBLAS's rules for the sides of a product."""
    kinds = {_family(a), _family(b)}
    assert len(kinds) == 1, f"one matrix is in FP8 and the other is not, or otherwise: {kinds}"
    if kinds == {"plain"} or not m * n * k:
        return  # an expert without rows is skipped
    assert k % 16 == 0, f"the sum has {k} terms: caller must pad"
    assert m % 8 == 0, f"{m} columns: caller must pad"
    if kinds == {"blocks"}:
        assert not (a._is_2D_scaled and b._is_2D_scaled), "no product of two matrices in squares"
        assert b._is_2D_scaled or n % 8 == 0, f"{n} rows: caller must pad"
    if kinds == {"micro"}:
        assert k % MICRO == 0


def _family(t: Any) -> str:
    names = {"_is_2D_scaled": "blocks", "_with_gemm_swizzled_scales": "micro", "_transpose_invalid": "tensor"}
    return next((family for name, family in names.items() if hasattr(t, name)), "plain")
