"""Log-probs and entropy from hidden states under vocabulary parallelism, without full logits and without gathering
the vocabulary.

The head is applied to a chunk of tokens at a time. Each tensor rank holds V/tp columns; the soft-max needs three
all-reduces of one number per token (maximum, sum of exponentials, and the target's logit with the entropy's moment).
The backward pass computes the chunk's logits again, so the memory is `chunk · V/tp` instead of `T · V/tp`.

Legend: T tokens, H hidden width, V padded vocabulary, v = V / tp columns of this rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def vocab_parallel_logprobs(
    hidden_TH: Tensor,
    weight_vH: Tensor,
    targets_T: Tensor,
    *,
    vocab: int,
    temperature: float,
    chunk: int,
    group: dist.ProcessGroup,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and the entropy of each distribution, in nats, float32.

    Args:
        hidden_TH: hidden states after the final norm, the same on all ranks of `group`.
        weight_vH: this rank's rows of the output head.
        targets_T: int64 token ids.
        vocab: size of the real vocabulary; padded columns beyond it have probability 0.
        temperature: divides the logits, as the sampler does.
        chunk: tokens whose logits exist at once.
        group: the tensor-parallel group.

    Returns:
        logprobs_T (differentiable; the hidden states' gradient is this rank's part, which the caller sums over `group`)
        and entropy_T (not differentiable: a measurement).
    """
    return _LogProbs.apply(hidden_TH, weight_vH, targets_T, vocab, temperature, chunk, group)


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_vH: Tensor,
        targets_T: Tensor,
        vocab: int,
        temperature: float,
        chunk: int,
        group: dist.ProcessGroup,
    ) -> tuple[Tensor, Tensor]:
        width = weight_vH.shape[0]
        ctx.first = first = dist.get_rank(group) * width
        ctx.valid = max(0, min(width, vocab - first))
        ctx.temperature, ctx.chunk = temperature, chunk
        logprobs_T = torch.empty(len(hidden_TH), dtype=torch.float32, device=hidden_TH.device)
        entropy_T = torch.empty_like(logprobs_T)
        norm_T = torch.empty_like(logprobs_T)
        for part in _chunks(len(hidden_TH), chunk):
            logits = _logits(hidden_TH[part], weight_vH, ctx.valid, temperature)
            peak = logits.amax(-1)
            dist.all_reduce(peak, dist.ReduceOp.MAX, group=group)
            logits -= peak[:, None]
            local, inside = _local(targets_T[part], first, ctx.valid)
            target = logits.gather(1, local[:, None])[:, 0].where(inside, torch.zeros_like(peak))
            exp = logits.exp()
            # A padded column has exp 0; 0 · -inf must not become nan.
            moment = (exp * logits.masked_fill(exp == 0, 0.0)).sum(-1)
            sums = torch.stack([exp.sum(-1), target, moment])
            dist.all_reduce(sums, group=group)
            log_sum = sums[0].log()
            logprobs_T[part] = sums[1] - log_sum
            entropy_T[part] = log_sum - sums[2] / sums[0]
            norm_T[part] = peak + log_sum
        ctx.save_for_backward(hidden_TH, weight_vH, targets_T, norm_T)
        ctx.mark_non_differentiable(entropy_T)
        return logprobs_T, entropy_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad_T = grads[0]
        hidden_TH, weight_vH, targets_T, norm_T = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden_TH)
        grad_weight = torch.zeros(weight_vH.shape, dtype=torch.float32, device=weight_vH.device)
        for part in _chunks(len(hidden_TH), ctx.chunk):
            # d logp / d logits = onehot(target) - softmax
            probs = (_logits(hidden_TH[part], weight_vH, ctx.valid, ctx.temperature) - norm_T[part, None]).exp_()
            local, inside = _local(targets_T[part], ctx.first, ctx.valid)
            grad_logits = probs.neg_()
            grad_logits.scatter_add_(1, local[:, None], inside[:, None].to(grad_logits.dtype))
            grad_logits *= (grad_T[part] / ctx.temperature)[:, None]
            grad_logits = grad_logits.to(weight_vH.dtype)
            grad_hidden[part] = grad_logits @ weight_vH
            grad_weight += grad_logits.T @ hidden_TH[part]
        return grad_hidden, grad_weight.to(weight_vH.dtype), None, None, None, None, None


def _chunks(total: int, chunk: int) -> list[slice]:
    return [slice(i, min(i + chunk, total)) for i in range(0, total, chunk)]


def _logits(hidden: Tensor, weight: Tensor, valid: int, temperature: float) -> Tensor:
    logits = (hidden @ weight.T).float()
    if temperature != 1.0:
        logits /= temperature
    logits[:, valid:] = float("-inf")
    return logits


def _local(targets: Tensor, first: int, valid: int) -> tuple[Tensor, Tensor]:
    """The targets' columns on this rank, and whether they are here at all."""
    local = targets - first
    inside = (local >= 0) & (local < valid)
    return local.where(inside, torch.zeros_like(local)), inside
