"""RMSNorm for the layers of `policy.spec=local`, faster on CPUs than torch's, and a norm over all heads of a token."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


class RMSNorm(torch.nn.Module):
    """RMSNorm (arXiv:1910.07467). Under sequence parallelism megatron-core sums the weight's gradient over the tensor
    group. Arguments as for megatron-core's norms."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centered = config.layernorm_zero_centered_gamma
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Returns x [..., hidden_size], divided by the root of the mean square over the last dimension plus `eps`, and
        multiplied by the weight. With `layernorm_zero_centered_gamma` it computes in float32, with 1 + weight. The
        result has the type of x."""
        if self.zero_centered:
            return rms_norm(x.float(), 1 + self.weight.float(), self.eps).to(x.dtype)
        return rms_norm(x, self.weight, self.eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns `weight` [D] · x / sqrt(mean of x² over the last dimension + eps), in the shape of `x` [..., D]. In
    float32 on a CPU by `_FewPasses`, otherwise by torch."""
    if x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32:
        return _FewPasses.apply(x, weight, eps)
    return F.rms_norm(x, x.shape[-1:], weight, eps)


class _FewPasses(torch.autograd.Function):
    """RMSNorm of float32 tensors on a CPU, in 3 passes over the memory forward and 6 backward. torch has no CPU kernel:
    it runs one operation after another and takes three times as long.

    Sums are plain float32 sums, so errors relative to the largest number are about 1e-6, and 1e-5 in the weight's
    gradient over 200,000 tokens.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Returns the normed x [..., D]."""
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return (x * inverse).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """Returns the gradients of x and the weight.

        With s = inverse root: dx = s · (g · w) - x · s³ · mean(g · w · x), and dw = Σ g · x · s over the tokens.
        """
        x, weight, inverse = ctx.saved_tensors
        width = x.shape[-1]
        product, scale = (grad * x).reshape(-1, width), inverse.reshape(-1)
        mean = torch.mv(product, weight).mul_(scale.pow(3)).div_(-width)
        in_x = (grad * weight).mul_(inverse).addcmul_(x, mean.view_as(inverse))
        return in_x, torch.mv(product.t(), scale), None


class AllHeadsRMSNorm(torch.nn.Module):
    """RMSNorm over all heads of a token together (OLMoE, arXiv:2409.02060, section 4.2.4).

    Every tensor rank holds the whole weight [heads · D] and uses the part of its own heads; megatron-core sums the
    gradients of query and key norms over the tensor group. The sum of squares is over all ranks' heads.

    Args:
        hidden_size: Width D of a head.
        heads: Number of heads of all tensor ranks together. Other arguments as for megatron-core's norms.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, *, heads: int, **_: Any) -> None:
        super().__init__()
        self.eps, self.width = eps, heads * hidden_size
        self.weight = torch.nn.Parameter(torch.ones(self.width, dtype=config.params_dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Returns x [..., local heads, D], divided by the root of the mean square (plus `eps`) over all heads of all
        tensor ranks, and multiplied by this rank's part of the weight. A collective of the tensor ranks if the heads
        are split."""
        flat = x.flatten(-2).float()
        local = flat.shape[-1]
        squares = flat.square().sum(-1, keepdim=True)
        weight: Tensor = self.weight
        if local < self.width:
            # Each rank's result depends on the sum, so the sum's gradient is a sum over ranks as well.
            squares = copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(squares))
            weight = weight.narrow(0, mpu.get_tensor_model_parallel_rank() * local, local)
        normed = flat * torch.rsqrt(squares / self.width + self.eps)
        return (normed.to(x.dtype) * weight).view_as(x)
