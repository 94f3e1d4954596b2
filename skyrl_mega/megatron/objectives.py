"""What an optimizer step minimises: a loss, and what it is given of the tokens of a micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from skyrl_mega.algorithms.losses import LossInputs, Metrics, find
from skyrl_mega.config.schema import AlgorithmConfig

if TYPE_CHECKING:
    from skyrl_mega.megatron.packing import MicroBatch  # it imports megatron-core, and the driver imports this file

Objective = Callable[[LossInputs], tuple[Tensor, Metrics]]
"""A loss with its settings."""


def objective(loss: str, algorithm: AlgorithmConfig) -> Objective:
    """The loss of this name with these settings."""
    compute = find(loss)
    return lambda inputs: compute(inputs, algorithm)


supervised = objective("supervised", AlgorithmConfig())
"""Cross-entropy of the given tokens; field: weights."""


def inputs_of(
    logprobs: Tensor, entropy: Tensor, micro: MicroBatch, group: dist.ProcessGroup | None = None
) -> LossInputs:
    """A micro-batch's tokens as a loss sees them.

    Args:
        logprobs: [L], with a gradient.
        entropy: [L].
        micro: Fields: weights; advantages and old_logprobs but in a supervised step; where there are such,
            rollout_logprobs, reference_logprobs, values and kl_weights.
        group: Context ranks that share the sequences; None where a rank has all of each.
    """
    fields = micro.fields
    absent = torch.full_like(logprobs, torch.nan, requires_grad=False)  # a loss that reads it fails
    return LossInputs(
        logprobs_L=logprobs,
        weights_L=fields["weights"],
        old_L=fields.get("old_logprobs", absent),
        advantages_L=fields.get("advantages", absent),
        rollout_L=fields.get("rollout_logprobs"),
        reference_L=fields.get("reference_logprobs"),
        values_L=fields.get("values"),
        entropy_L=entropy,
        kl_weights_L=fields.get("kl_weights"),
        sequence_L=micro.answer,
        sequences=micro.answers,
        **({} if group is None else {"sum_over_ranks": partial(sum_over, group)}),
    )


def sum_over(group: dist.ProcessGroup, partial_sums: Tensor) -> Tensor:
    """The sum over a group's ranks, which all of them get. Its gradient is the sum of theirs."""
    total: Tensor = _SumOver.apply(partial_sums, group)
    return total


class _SumOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None
