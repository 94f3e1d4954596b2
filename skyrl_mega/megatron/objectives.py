"""Objectives of an optimizer step: a loss, with inputs built from a micro-batch's tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from skyrl_mega.algorithms.losses import Figures, LossInputs, Metrics, find
from skyrl_mega.algorithms.losses.value import ValueInputs, value
from skyrl_mega.algorithms.mismatch import mismatch_sums
from skyrl_mega.config.schema import AlgorithmConfig

if TYPE_CHECKING:
    from skyrl_mega.megatron.packing import MicroBatch  # imports megatron-core; the driver imports this file

Objective = Callable[[LossInputs], tuple[Tensor, Metrics]]
"""A loss with bound settings."""
ValueObjective = Callable[[ValueInputs], tuple[Tensor, Metrics]]
"""A critic's loss with bound settings."""
VALUE = "value"
"""Name of the critic's loss, not available for a policy."""


def objective(loss: str, algorithm: AlgorithmConfig, figures: Figures | None = None) -> Objective:
    """Returns the loss as a function of `LossInputs`, with bound settings. The function returns the loss and metrics,
    which include the mismatch between policy and engine if the inputs contain engine log-probs.

    With `algorithm.old_logprobs=engine` the loss uses the engine's log-probs as old log-probs; the mismatch still
    compares with the policy's.

    Args:
        loss: `algorithm.loss`, or "supervised".
        algorithm: Settings of the loss.
        figures: Figures of the run for the loss; None keeps the figures of the inputs.

    Raises:
        UserError: The loss cannot be found or imported.
    """
    compute = find(loss)

    def with_mismatch(inputs: LossInputs) -> tuple[Tensor, Metrics]:
        loss_inputs = inputs if figures is None else replace(inputs, figures=figures)
        if algorithm.old_logprobs == "engine" and inputs.rollout_L is not None:
            loss_inputs = replace(loss_inputs, old_L=inputs.rollout_L)
        value, metrics = compute(loss_inputs, algorithm)
        return value, {**metrics, **mismatch_sums(inputs)}

    return with_mismatch


def value_objective(clip: float | None) -> ValueObjective:
    """Returns a critic's loss as a function of `ValueInputs`; `clip` limits the change of values (None: no limit)."""
    return partial(value, clip=clip)


supervised = objective("supervised", AlgorithmConfig())
"""Cross-entropy of the given tokens; column: weights."""


def inputs_of(
    logprobs: Tensor, entropy: Tensor, micro: MicroBatch, group: dist.ProcessGroup | None = None
) -> LossInputs:
    """Returns a micro-batch's tokens as inputs of a loss of the policy.

    Args:
        logprobs: [L] in nats, with a gradient.
        entropy: [L] in nats, with a gradient.
        micro: Columns: weights; advantages except in a supervised step; if present, old_logprobs, rollout_logprobs,
            drawn, reference_logprobs, high_covariance, high_entropy and kl_weights. Without old_logprobs the weights
            are those at the start of the RL step, and the log-probs themselves serve as old ones.
        group: Context ranks sharing the sequences; None if a rank holds whole sequences.

    Raises:
        KeyError: The column weights is missing.
    """
    columns = micro.columns
    missing = torch.full_like(logprobs, torch.nan, requires_grad=False)  # NaN: makes a loss fail that reads it
    old = columns.get("old_logprobs", logprobs.detach())
    rollout, drawn = columns.get("rollout_logprobs"), columns.get("drawn")
    if rollout is not None and drawn is not None:
        rollout = torch.where(drawn, rollout, old)  # no correction for tokens not sampled by an engine
    inputs = LossInputs(
        logprobs_L=logprobs,
        weights_L=columns["weights"],
        old_L=old,
        advantages_L=columns.get("advantages", missing),
        rollout_L=rollout,
        drawn_L=drawn,
        reference_L=columns.get("reference_logprobs"),
        entropy_L=entropy,
        high_covariance_L=columns.get("high_covariance"),
        high_entropy_L=columns.get("high_entropy"),
        kl_weights_L=columns.get("kl_weights"),
        sequence_L=micro.answer,
        sequences=micro.answers,
    )
    return inputs if group is None else replace(inputs, sum_over_ranks=partial(sum_over, group))


def value_inputs(values: Tensor, micro: MicroBatch) -> ValueInputs:
    """Returns a micro-batch's tokens as inputs of a critic's loss.

    Args:
        values: [L], with a gradient.
        micro: Columns: weights, old_values, returns.

    Raises:
        KeyError: A column is missing.
    """
    columns = micro.columns
    return ValueInputs(
        values_L=values, weights_L=columns["weights"], old_L=columns["old_values"], returns_L=columns["returns"]
    )


def sum_over(group: dist.ProcessGroup, partial_sums: Tensor) -> Tensor:
    """Returns the sum of `partial_sums` over a group's ranks, on every rank. A collective, also in the backward pass:
    the gradient is the sum of the ranks' gradients."""
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
