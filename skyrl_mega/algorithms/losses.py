"""The policy loss: PPO's clipped surrogate with DAPO's and dual-clip's bounds, as a weighted sum over tokens.

Every token has a weight that is fixed before the mini-batch is cut (`token_weights`). The loss of a mini-batch is the
plain sum of its micro-batches' losses, and so is its gradient: neither depends on micro-batch size, packing or
parallel layout.

Tensors are packed, [T]: the tokens of the micro-batch's sequences one after the other. Entries where the weight is 0
(prompts, observations, padding) may hold anything, NaN included.
"""

from __future__ import annotations

import torch
from torch import Tensor

from skyrl_mega.algorithms.kl import LOG_RATIO_LIMIT, kl
from skyrl_mega.config.schema import AlgorithmConfig


def token_weights(mask_T: Tensor, lengths_N: Tensor, mode: str) -> Tensor:
    """Each token's weight in the loss, computed once over a whole mini-batch, all DP ranks' sequences included.

        tokens     w_t = m_t / Σ m                        (DAPO, arXiv:2503.14476, equation 12)
        sequences  w_t = m_t / (sequences · Σ m of its sequence)   (GRPO, arXiv:2402.03300, equation 3)

    Sequences whose mask is all 0 count for nothing. The weights sum to 1, or to 0 where nothing is left to learn from.

    Args:
        mask_T: Loss mask [T], 1 where the policy produced the token and it counts.
        lengths_N: Tokens of each sequence; sum(lengths) = T.
        mode: `algorithm.loss_mean`, "tokens" or "sequences".

    Returns:
        float32 [T].
    """
    mask_T = mask_T.double()
    sequence_T = torch.repeat_interleave(torch.arange(len(lengths_N), device=mask_T.device), lengths_N)
    tokens_N = mask_T.new_zeros(len(lengths_N)).index_add(0, sequence_T, mask_T)
    match mode:
        case "tokens":
            return (mask_T / tokens_N.sum().clamp(min=1)).float()
        case "sequences":
            sequences = (tokens_N > 0).sum().clamp(min=1)
            return (mask_T / (sequences * tokens_N.clamp(min=1))[sequence_T]).float()
    raise ValueError(f"algorithm.loss_mean={mode!r}")


def policy_loss(
    logprobs_T: Tensor,
    *,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    algorithm: AlgorithmConfig,
    rollout_logprobs_T: Tensor | None = None,
    reference_logprobs_T: Tensor | None = None,
    entropy_T: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of one packed micro-batch, summed, and its metrics.

        r_t = exp(logprob_t - old_t)
        L_t = -min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)   PPO arXiv:1707.06347 (7), DAPO (10)
        L_t =  min(L_t, -c A_t) where A_t < 0                             dual clip, arXiv:1912.09729
        ρ_t =  min(exp(old_t - rollout_t), importance_cap), no gradient   truncated importance sampling,
                                                                          fengyao.notion.site/off-policy-rl
        loss = Σ w_t (ρ_t L_t + kl.coefficient · KL_t)

    Args:
        logprobs_T: Log-probs under the weights that are trained; the only input with a gradient.
        old_logprobs_T: Log-probs under the weights at the start of the RL step, from the policy itself.
        advantages_T: Each token's advantage.
        weights_T: Slice of `token_weights` for these tokens.
        algorithm: Clips, cap and KL settings.
        rollout_logprobs_T: The engine's log-probs; needed where `importance_cap` is set.
        reference_logprobs_T: The reference's; needed where `kl.coefficient` is above 0.
        entropy_T: Entropy of the policy at each token, for the metric only.

    Returns:
        The loss, a scalar; and metrics without gradient, each already weighted by w: summed over the micro-batches
        and the DP × CP ranks of a mini-batch, they are its means. Keys: loss, ratio, clip_fraction, kl_old, and where
        there is an input for it dual_clip_fraction, importance_weight, kl, entropy.

    Raises:
        ValueError: A log-prob that the settings need is missing.
    """
    active_T = weights_T != 0

    def clean(values_T: Tensor) -> Tensor:
        return torch.where(active_T, values_T, 0.0)  # 0 · NaN would be NaN, in the loss and in its gradient

    def mean(values_T: Tensor) -> Tensor:
        return (weights_T * values_T).detach().sum()

    logprobs_T, old_T, advantages_T = clean(logprobs_T), clean(old_logprobs_T.detach()), clean(advantages_T)
    ratio_T = (logprobs_T - old_T).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    unclipped_T = -ratio_T * advantages_T
    clipped_T = -ratio_T.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high) * advantages_T
    losses_T = torch.maximum(unclipped_T, clipped_T)
    metrics = {
        "ratio": mean(ratio_T),
        "clip_fraction": mean((clipped_T > unclipped_T).to(weights_T.dtype)),
        "kl_old": mean(kl(logprobs_T, old_T, "k3")),
    }

    if algorithm.dual_clip is not None:
        bound_T = torch.where(advantages_T < 0, -algorithm.dual_clip * advantages_T, torch.inf)
        metrics["dual_clip_fraction"] = mean((losses_T > bound_T).to(weights_T.dtype))
        losses_T = torch.minimum(losses_T, bound_T)

    if algorithm.importance_cap is not None:
        if rollout_logprobs_T is None:
            raise ValueError("algorithm.importance_cap needs the engine's log-probs")
        importance_T = (old_T - clean(rollout_logprobs_T.detach())).clamp(max=LOG_RATIO_LIMIT).exp()
        importance_T = importance_T.clamp(max=algorithm.importance_cap)
        metrics["importance_weight"] = mean(importance_T)
        losses_T = importance_T * losses_T

    if reference_logprobs_T is not None:
        kl_T = kl(logprobs_T, clean(reference_logprobs_T.detach()), algorithm.kl.estimator)
        metrics["kl"] = mean(kl_T)
        losses_T = losses_T + algorithm.kl.coefficient * kl_T
    elif algorithm.kl.coefficient > 0:
        raise ValueError("algorithm.kl.coefficient needs the reference's log-probs")

    if entropy_T is not None:
        metrics["entropy"] = mean(clean(entropy_T))
    loss = (weights_T * losses_T).sum()
    return loss, {"loss": loss.detach(), **metrics}
