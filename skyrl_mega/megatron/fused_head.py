"""The output head without logits in memory (`kernels/linear_logprobs.py`) under vocabulary parallelism.

Each tensor rank sums over its own columns. Two all-reduces combine the ranks' sums into one distribution: of the
largest logit per token, then of the remaining three sums, or four. The host waits for neither. The backward pass needs
no communication.

Legend: as in `vocab_parallel`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from skyrl_mega.kernels.linear_logprobs import PEAK, Head, Inputs, Saved, finish, gradients, merge, partial_sums, rebase


def fused_logprobs(
    hidden_TH: Tensor,
    weight_vH: Tensor,
    targets_T: Tensor,
    *,
    vocab: int,
    temperature: float,
    group: dist.ProcessGroup,
    squares: bool = False,
) -> tuple[Tensor, ...]:
    """Returns the targets' log-probs and the entropies in nats, with `squares` also Σ p², each [T] float32; logits are
    never in memory. A collective of `group`.

    Args:
        hidden_TH: Hidden states, the same on all ranks of `group`.
        weight_vH: This rank's rows of the output head.
        targets_T: int64 token ids, below `vocab`.
        vocab: Size of the vocabulary without padding; padded columns get probability 0.
        temperature: Divides the logits.
        group: The tensor-parallel group.
        squares: True to add Σ p² as third result, without a gradient; log-probs and entropies are differentiable.
    """
    width = len(weight_vH)
    first = dist.get_rank(group) * width
    head = Head(valid=max(0, min(width, vocab - first)), first=first, temperature=temperature)
    outputs: tuple[Tensor, ...] = _Fused.apply(hidden_TH, weight_vH, targets_T, head, group, squares)
    return outputs


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_vH: Tensor,
        targets_T: Tensor,
        head: Head,
        group: dist.ProcessGroup,
        squares: bool,
    ) -> tuple[Tensor, ...]:
        sums_QT = merge(partial_sums(Inputs(hidden_TH, weight_vH, targets_T, head), squares=squares))
        peak_T = sums_QT[PEAK].clone()
        dist.all_reduce(peak_T, dist.ReduceOp.MAX, group=group)
        rebase(sums_QT, peak_T)
        dist.all_reduce(sums_QT[PEAK + 1 :], group=group)
        sums_QT[PEAK] = peak_T
        logprobs_T, squares_T, saved = finish(sums_QT)
        ctx.head = head
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden_TH, weight_vH, targets_T, saved.peak_T, saved.log_sum_T, saved.entropy_T)
        if squares_T is None:
            return logprobs_T, saved.entropy_T
        ctx.mark_non_differentiable(squares_T)
        return logprobs_T, saved.entropy_T, squares_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        hidden_TH, weight_vH, targets_T, *rows = ctx.saved_tensors
        saved, (grad_logprobs_T, grad_entropy_T, *_) = Saved(*rows), grads
        if grad_logprobs_T is None:
            grad_logprobs_T = torch.zeros_like(saved.peak_T)
        inputs = Inputs(hidden_TH, weight_vH, targets_T, ctx.head)
        return *gradients(inputs, saved, grad_logprobs_T, grad_entropy_T), None, None, None, None
