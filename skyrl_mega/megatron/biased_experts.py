"""The second linear layer of experts with biases, in megatron-core's local layers."""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel import RowParallelLinear
from torch import Tensor


class ExpertRowParallelLinear(RowParallelLinear):
    """A row-parallel linear layer whose result may be changed in place.

    megatron-core adds an expert's bias in place. Without expert and tensor parallelism the result is a view of the
    input of its own (empty) sum over ranks, and autograd refuses the backward pass.
    """

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the product, in memory of its own, and the layer's bias (None without a bias)."""
        output, bias = super().forward(input_)
        return output.clone(), bias


def use_biased_experts(mlp: Any) -> None:
    """Replaces the second linear layer of every expert by `ExpertRowParallelLinear`.

    Args:
        mlp: The `ModuleSpec` of a local layer's feed-forward part with experts, changed in place.
    """
    mlp.submodules.experts.submodules.linear_fc2 = ExpertRowParallelLinear
