"""Rotary position embeddings (arXiv:2104.09864) of packed rows, for the layers of `policy.spec=local`.

megatron-core computes cosines and sines again for the queries and the keys of every layer, sequence by sequence. Here
they are computed once per row, and `PackedAttention` rotates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class Rotation:
    """The rotation of a row's queries and keys.

    Legend: L tokens of the row on this rank, R rotated numbers of a head, in two halves.
    """

    cos: Tensor
    """[L, 1, R]: cosines times the scale."""
    sin: Tensor
    """[L, 1, R / 2]: sines times the scale, for the first half; the second half has the same."""

    @staticmethod
    def of(angles: Tensor, position_L: Tensor, scale: float, dtype: torch.dtype) -> Rotation:
        """Returns the rotation of a row.

        Args:
            angles: [S, 1, 1, R], the angles of positions 0 … S - 1 in radians, equal in both halves (megatron-core's
                `rotary_pos_emb`).
            position_L: int64 [L], position of each token, below S.
            scale: Factor of the rotated numbers (YaRN's `mscale`).
            dtype: Type of the cosines and sines, that of queries and keys.
        """
        angles = angles[:, 0]
        cos, sin = angles.cos() * scale, angles[..., : angles.shape[-1] // 2].sin() * scale
        return Rotation(cos.to(dtype)[position_L], sin.to(dtype)[position_L])

    def __call__(self, x: Tensor) -> Tensor:
        """Returns queries or keys [L, heads, D], the first R numbers of each head rotated and the others unchanged."""
        return _Rotate.apply(x, self.cos, self.sin)


class _Rotate(torch.autograd.Function):
    """The rotation, whose backward pass is the rotation by the negative angles."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, sin, -1), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    """Returns x [L, heads, D] rotated by the angles times `sign`."""
    half, rotated = sin.shape[-1], cos.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    torch.mul(x[..., :rotated], cos, out=out[..., :rotated])
    out[..., :half].addcmul_(x[..., half:rotated], sin, value=-sign)
    out[..., half:rotated].addcmul_(x[..., :half], sin, value=sign)
    out[..., rotated:] = x[..., rotated:]
    return out
