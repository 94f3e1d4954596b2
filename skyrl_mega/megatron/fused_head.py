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


class FusedLogprobs(torch.autograd.Function):
    """The log-probs, entropies and sums of squares of `vocab_parallel.vocab_parallel_logprobs`, all float32."""

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
