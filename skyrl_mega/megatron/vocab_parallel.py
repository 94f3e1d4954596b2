"""Log-probs, entropy and squared probabilities from hidden states under vocabulary parallelism, without full logits and
without gathering the vocabulary.

The fused head (`fused_head.py`) sums logits in registers. This file is the alternative in plain torch, applying the
head to a chunk of tokens at a time. Each tensor rank holds V/tp columns. The softmax needs three all-reduces with one
number per token (maximum; sum of exponentials; the target's logit together with the entropy's moment). The backward
pass recomputes the chunk's logits, so the memory is `chunk · V/tp` instead of `T · V/tp`. A single chunk keeps its
logits for the backward pass.

Legend: T tokens, H hidden width, V padded vocabulary, v = V / tp columns of this rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from skyrl_mega.kernels.linear_logprobs import Head, chunks, precise
from skyrl_mega.megatron.fused_head import FusedLogprobs


def vocab_parallel_logprobs(
    hidden_TH: Tensor,
    weight_vH: Tensor,
    targets_T: Tensor,
    *,
    vocab: int,
    temperature: float,
    chunk: int | None,
    group: dist.ProcessGroup,
    squares: bool = False,
) -> tuple[Tensor, ...]:
    """Returns the log-prob of each target and the entropy of each distribution, in nats, float32 (float64 from
    float64). A collective of `group`.

    Args:
        hidden_TH: Hidden states after the final norm, the same on all ranks of `group`.
        weight_vH: This rank's rows of the output head.
        targets_T: int64 token ids, below `vocab`.
        vocab: Size of the real vocabulary; padded columns beyond it get probability 0.
        temperature: Divides the logits, as in the sampler.
        chunk: Number of tokens with logits in memory at a time; None for the fused head, without logits in memory
            (`config.derived.logit_chunk`).
        group: The tensor-parallel group.
        squares: True to also compute Σ_v p(v)² of each distribution.

    Returns:
        logprobs_T and entropy_T, both differentiable; the hidden states' gradient is this rank's part, to be summed
        over `group` by the caller. Entropy without a gradient costs nothing in the backward pass. With `squares` also
        squares_T, without a gradient.
    """
    width = len(weight_vH)
    first = dist.get_rank(group) * width
    head = Head(valid=max(0, min(width, vocab - first)), first=first, temperature=temperature)
    inputs = (hidden_TH, weight_vH, targets_T, head, group, squares)
    outputs: tuple[Tensor, ...]
    if chunk is None:
        outputs = FusedLogprobs.apply(*inputs)
    else:
        keeps_logits = torch.is_grad_enabled() and len(hidden_TH) <= chunk
        outputs = _ChunkedLogprobs.apply(*inputs, chunk, keeps_logits)
    return outputs


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_vH: Tensor,
        targets_T: Tensor,
        head: Head,
        group: dist.ProcessGroup,
        squares: bool,
        chunk: int,
        keeps_logits: bool,
    ) -> tuple[Tensor, ...]:
        ctx.head, ctx.chunk = head, chunk
        ctx.set_materialize_grads(False)
        logprobs_T = torch.empty(len(hidden_TH), dtype=precise(hidden_TH.dtype), device=hidden_TH.device)
        entropy_T = torch.empty_like(logprobs_T)
        norm_T = torch.empty_like(logprobs_T)
        squares_T = torch.empty_like(logprobs_T) if squares else None
        kept = []
        for part in chunks(len(hidden_TH), chunk):
            logits = _logits(hidden_TH[part], weight_vH, head)
            peak = logits.amax(-1)
            dist.all_reduce(peak, dist.ReduceOp.MAX, group=group)
            if keeps_logits:
                kept.append(logits)
                logits = logits - peak[:, None]
            else:
                logits -= peak[:, None]
            local, inside = _local(targets_T[part], head)
            target = logits.gather(1, local[:, None])[:, 0].where(inside, torch.zeros_like(peak))
            exp = logits.exp()
            # A padded column has exp 0; 0 · -inf must not become nan.
            moment = (exp * logits.masked_fill(exp == 0, 0.0)).sum(-1)
            summed = [exp.sum(-1), target, moment]
            if squares:
                summed.append(exp.square_().sum(-1))
            sums = torch.stack(summed)
            dist.all_reduce(sums, group=group)
            log_sum = sums[0].log()
            logprobs_T[part] = sums[1] - log_sum
            entropy_T[part] = log_sum - sums[2] / sums[0]
            norm_T[part] = peak + log_sum
            if squares_T is not None:
                squares_T[part] = sums[3] / sums[0].square()
        ctx.save_for_backward(hidden_TH, weight_vH, targets_T, norm_T, entropy_T, *kept)
        if squares_T is None:
            return logprobs_T, entropy_T
        ctx.mark_non_differentiable(squares_T)
        return logprobs_T, entropy_T, squares_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        hidden_TH, weight_vH, targets_T, norm_T, entropy_T, *kept = ctx.saved_tensors
        grad_logprobs_T, grad_entropy_T, *_ = grads
        if grad_logprobs_T is None:
            grad_logprobs_T = torch.zeros_like(norm_T)
        grad_hidden = torch.empty_like(hidden_TH)
        grad_weight = torch.zeros(weight_vH.shape, dtype=precise(weight_vH.dtype), device=weight_vH.device)
        for part in chunks(len(hidden_TH), ctx.chunk):
            # d log p(target) / d logits = onehot(target) - p;  d entropy / d logits = -p (log p + entropy)
            logits = kept[0] if kept else _logits(hidden_TH[part], weight_vH, ctx.head)
            logprobs = logits - norm_T[part, None]
            del logits
            scale = grad_logprobs_T[part]
            if grad_entropy_T is None:
                grad_logits = logprobs.exp_().mul_(-scale[:, None])
            else:
                probs = logprobs.exp()
                # A padded column has probability 0; 0 · -inf must not become nan.
                pull = logprobs.masked_fill_(probs == 0, 0.0).add_(entropy_T[part, None])
                grad_logits = pull.mul_(grad_entropy_T[part, None]).add_(scale[:, None]).mul_(probs).neg_()
            local, inside = _local(targets_T[part], ctx.head)
            grad_logits.scatter_add_(1, local[:, None], torch.where(inside, scale, 0.0)[:, None])
            grad_logits = grad_logits.div_(ctx.head.temperature).to(weight_vH.dtype)
            grad_hidden[part] = grad_logits @ weight_vH
            grad_weight += grad_logits.T @ hidden_TH[part]
        return grad_hidden, grad_weight.to(weight_vH.dtype), *[None] * 6


def _logits(hidden: Tensor, weight: Tensor, head: Head) -> Tensor:
    logits = (hidden @ weight.T).to(precise(hidden.dtype))
    if head.temperature != 1.0:
        logits /= head.temperature
    logits[:, head.valid :] = float("-inf")
    return logits


def _local(targets: Tensor, head: Head) -> tuple[Tensor, Tensor]:
    """Returns the targets' columns on this rank, and a mask of the targets on this rank."""
    local = targets - head.first
    inside = (local >= 0) & (local < head.valid)
    return local.where(inside, torch.zeros_like(local)), inside
