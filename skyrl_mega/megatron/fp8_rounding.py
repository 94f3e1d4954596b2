"""Numbers as FP8 has them, in the type that they came in: scaled, rounded to E4M3 or E5M2, and scaled back.

Three ways of sharing a scale:

- `tensor`: one power of two for a tensor, the largest with which its magnitude is still a number of the format. A power
  of two rounds no number otherwise than another one would, but for those that are 2¹³ times smaller than the largest
  (E4M3; 2²⁸ times, E5M2): the result does not depend on which rows are in the tensor.
- `blocks`: float32 scales of 128 numbers along a row, magnitude / 448, as vLLM has them for activations (DeepSeek-V3,
  arXiv:2412.19437, section 3.3.2).
- `microscaled`: powers of two of 32 numbers along a row, rounded up so that nothing is clipped, as Transformer Engine
  has them (the MX specification of the Open Compute Project rounds down and clips).

128 × 128 blocks of weights are those of `kernels.block_fp8`. NaN stays NaN.

Legend: R rows, C columns.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BLOCK, MICRO = 128, 32
"""Numbers that share a scale."""
LOWEST = -127
"""The smallest exponent of a microscaled block (E8M0)."""


def magnitude(x: Tensor) -> Tensor:
    """The largest magnitude, float32 []; 0 of an empty tensor."""
    return x.detach().abs().amax().float() if x.numel() else x.new_zeros((), dtype=torch.float32)


def power(amax: Tensor, kind: torch.dtype) -> Tensor:
    """The largest power of two by which `amax` may be multiplied, float32 of its shape; 1 for 0, infinity and NaN."""
    room = torch.finfo(kind).max / amax
    _, exponent = torch.frexp(room)  # room = fraction · 2^exponent, fraction from 1/2 to 1
    found = torch.ldexp(torch.ones_like(amax), exponent - 1)
    return torch.where((room > 0) & room.isfinite(), found, 1.0)


def tensor(x: Tensor, scale: Tensor, kind: torch.dtype) -> Tensor:
    """The nearest numbers n / scale with n of the format; what is above its largest becomes that.

    Args:
        x: any shape.
        scale: float32 []; `power`.
        kind: E4M3 or E5M2.
    """
    most = torch.finfo(kind).max
    return ((x.float() * scale).clamp(-most, most).to(kind).float() / scale).to(x.dtype)


def blocks(x_RC: Tensor) -> Tensor:
    """E4M3 with a float32 scale for each 128 numbers of a row; the last block of a row may be shorter."""
    parts, width = _parts(x_RC, BLOCK)
    amax = parts.abs().amax(-1, keepdim=True)
    scale = torch.where(amax > 0, amax / torch.finfo(E4M3).max, 1.0)
    return _joined((parts / scale).to(E4M3).float() * scale, width, x_RC)


def microscaled(x_RC: Tensor) -> Tensor:
    """E4M3 with a power of two for each 32 numbers of a row; the last block of a row may be shorter."""
    parts, width = _parts(x_RC, MICRO)
    fraction, exponent = torch.frexp(parts.abs().amax(-1, keepdim=True) / torch.finfo(E4M3).max)
    up = exponent - (fraction == 0.5).int()  # fraction · 2^exponent, fraction from 1/2 to 1
    scale = torch.ldexp(torch.ones_like(fraction), up.clamp(min=LOWEST))
    return _joined((parts / scale).to(E4M3).float() * scale, width, x_RC)


def _parts(x_RC: Tensor, size: int) -> tuple[Tensor, int]:
    """Float32 [R, blocks, size], zeros behind a row's end, and C."""
    width = x_RC.shape[-1]
    padded = F.pad(x_RC.float(), (0, -width % size))
    return padded.unflatten(-1, (-1, size)), width


def _joined(parts: Tensor, width: int, like: Tensor) -> Tensor:
    return parts.flatten(-2)[..., :width].to(like.dtype)
