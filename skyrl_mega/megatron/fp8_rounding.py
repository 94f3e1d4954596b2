"""Rounding to FP8 values in the input's dtype: numbers are scaled, rounded to E4M3 or E5M2, and scaled back.

Three ways to share a scale:

- `tensor`: one power of two per tensor, the largest keeping the tensor's magnitude within the format. The choice of the
  power changes no rounded number, except numbers 2¹³ times smaller than the largest (E4M3; 2²⁸ times, E5M2). So the
  result does not depend on the rows in the tensor.
- `blocks`: one float32 scale per 128 numbers of a row, magnitude / 448, as in vLLM's activations (DeepSeek-V3,
  arXiv:2412.19437, section 3.3.2).
- `microscaled`: one power of two per 32 numbers of a row, rounded up to avoid clipping, as in Transformer Engine (the
  MX specification of the Open Compute Project rounds down and clips).

For 128 × 128 blocks of weights see `kernels.block_fp8`. NaN stays NaN.

Legend: R rows, C columns.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BLOCK, MICRO = 128, 32
"""Numbers per scale in `blocks` and in `microscaled`."""
LOWEST = -127
"""Smallest exponent of a microscaled block (E8M0)."""


def power(amax: Tensor, kind: torch.dtype) -> Tensor:
    """Returns the largest power of two p with `amax` · p within the range of the format `kind`: float32, the shape of
    `amax`.

    For an `amax` of 0, infinity or NaN the result is 1.
    """
    ratio = torch.finfo(kind).max / amax
    _, exponent = torch.frexp(ratio)  # ratio = fraction · 2^exponent, fraction from 1/2 to 1
    scale = torch.ldexp(torch.ones_like(amax), exponent - 1)
    return torch.where((ratio > 0) & ratio.isfinite(), scale, 1.0)


def tensor(x: Tensor, kind: torch.dtype) -> Tensor:
    """Returns a tensor of any shape rounded to values of E4M3 or E5M2 (`kind`) with one power of two as scale, in the
    dtype of `x` and a new tensor; an empty `x` is returned itself. With infinity or NaN in `x` the scale is 1, and
    infinity becomes the largest number of the format."""
    if not x.numel():
        return x
    scale, largest = power(x.detach().abs().amax().float(), kind), torch.finfo(kind).max
    return ((x.float() * scale).clamp(-largest, largest).to(kind).float() / scale).to(x.dtype)


def blocks(x_RC: Tensor) -> Tensor:
    """Returns `x_RC` [..., C] rounded to values of E4M3 with a float32 scale per 128 numbers of a row, in the same
    dtype; the last block of a row may be shorter. Infinity in a block makes it NaN."""
    parts, width = _parts(x_RC, BLOCK)
    amax = parts.abs().amax(-1, keepdim=True)
    scale = torch.where(amax > 0, amax / torch.finfo(E4M3).max, 1.0)
    return _joined((parts / scale).to(E4M3).float() * scale, width, x_RC)


def microscaled(x_RC: Tensor) -> Tensor:
    """Returns `x_RC` [..., C] rounded to values of E4M3 with a power-of-two scale per 32 numbers of a row, in the same
    dtype; the last block of a row may be shorter."""
    parts, width = _parts(x_RC, MICRO)
    fraction, exponent = torch.frexp(parts.abs().amax(-1, keepdim=True) / torch.finfo(E4M3).max)
    rounded_up = exponent - (fraction == 0.5).int()  # fraction · 2^exponent, fraction from 1/2 to 1
    scale = torch.ldexp(torch.ones_like(fraction), rounded_up.clamp(min=LOWEST))
    return _joined((parts / scale).to(E4M3).float() * scale, width, x_RC)


def _parts(x_RC: Tensor, size: int) -> tuple[Tensor, int]:
    """Returns x as float32 [R, blocks, size], rows padded with zeros, and C."""
    width = x_RC.shape[-1]
    padded = F.pad(x_RC.float(), (0, -width % size))
    return padded.unflatten(-1, (-1, size)), width


def _joined(parts: Tensor, width: int, like: Tensor) -> Tensor:
    return parts.flatten(-2)[..., :width].to(like.dtype)
