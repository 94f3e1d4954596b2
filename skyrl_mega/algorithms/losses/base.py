"""What a loss is given, and the parts that policy losses share.

    Loss = (LossInputs, AlgorithmConfig) → (the micro-batch's loss, summed over its tokens; metrics)

Every token has a weight that is fixed before the mini-batch is cut (`token_weights`). The loss of a mini-batch is the
plain sum of its micro-batches' losses, and so is its gradient: neither depends on micro-batch size, packing or
parallel layout. A loss keeps that property if it is a sum over tokens of `weights_L` times values that depend on the
token alone, or on its sequence by `sequence_mean`.

Legend: L tokens of the micro-batch on this rank, S sequences of the micro-batch. Under context parallelism a rank has
some tokens of every sequence. Entries where the weight is 0 (prompts, observations, padding) may hold anything, NaN
included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from skyrl_mega.algorithms.kl import LOG_RATIO_LIMIT, kl
from skyrl_mega.config.schema import AlgorithmConfig

Metrics = dict[str, Tensor]
"""Without gradient, each already weighted: summed over the micro-batches and the DP × CP ranks of a mini-batch, they
are its means. Those named `…_max` are maxima."""


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """The tokens of one micro-batch on one rank. Only `logprobs_L` has a gradient."""

    logprobs_L: Tensor
    """Log-probs under the weights that are trained."""
    weights_L: Tensor
    """Slice of `token_weights` for these tokens."""
    old_L: Tensor
    """Log-probs under the weights at the start of the RL step."""
    advantages_L: Tensor
    """Each token's advantage; NaN in a supervised step."""
    rollout_L: Tensor | None = None
    """The engine's log-probs."""
    drawn_L: Tensor | None = None
    """bool: whether the engine drew the token; None: all that count. Where it did not, `rollout_L` is `old_L`."""
    reference_L: Tensor | None = None
    """The reference's; there where `kl.coefficient` is above 0."""
    values_L: Tensor | None = None
    """A critic's values, where there is one."""
    entropy_L: Tensor | None = None
    """Entropy of the policy at each token, for the metric only."""
    kl_weights_L: Tensor | None = None
    """As `weights_L`, for the KL term's own mean; None takes `weights_L`."""
    sequence_L: Tensor | None = None
    """int64: number of the token's sequence in the micro-batch, the same on all context ranks. A sequence is one answer
    of the policy: a run of tokens with a weight. A trajectory of several turns has several, however
    `rollout.step_wise` cuts it into samples."""
    sequences: int = 0
    """Sequences of the micro-batch, those included of which this rank has no token."""
    sum_over_ranks: Callable[[Tensor], Tensor] = lambda partial_S: partial_S
    """Adds up the context ranks' partial sums; it can be differentiated through."""

    @property
    def active_L(self) -> Tensor:
        """bool: whether the token counts."""
        return self.weights_L != 0

    def clean(self, values_L: Tensor) -> Tensor:
        """The values, 0 where the weight is: 0 · NaN would be NaN, in the loss and in its gradient."""
        return torch.where(self.active_L, values_L, 0.0)

    def mean(self, values_L: Tensor) -> Tensor:
        """A metric: the weighted sum of the values, without gradient."""
        return (self.weights_L * values_L).detach().sum()

    def sequence_mean(self, values_L: Tensor) -> Tensor:
        """Each token gets the mean of the values over all tokens of its sequence that count: [L], differentiable.

        Under context parallelism all ranks of the group must call it, and use what it gives alike.
        """
        assert self.sequence_L is not None, "sequence_mean needs sequence_L"
        both = torch.stack([self.clean(values_L), self.active_L.to(values_L.dtype)])
        partial_2S = both.new_zeros(2, max(self.sequences, 1)).index_add(1, self.sequence_L, both)
        sums_S, counts_S = self.sum_over_ranks(partial_2S)
        return (sums_S / counts_S.clamp(min=1))[self.sequence_L]


Loss = Callable[[LossInputs, AlgorithmConfig], tuple[Tensor, Metrics]]


def log_ratio(inputs: LossInputs) -> Tensor:
    """log π(token) - log π_old(token) [L], 0 where the weight is."""
    return inputs.clean(inputs.logprobs_L) - inputs.clean(inputs.old_L.detach())


def clipped_surrogate(
    inputs: LossInputs, ratio_L: Tensor, low: float, high: float, dual_clip: float | None
) -> tuple[Tensor, Metrics]:
    """PPO's loss of every token (not weighted yet), and the metrics ratio, clip_fraction, kl_old, dual_clip_fraction.

    L_t = -min(r_t A_t, clip(r_t, 1 - low, 1 + high) A_t)     PPO arXiv:1707.06347 (7), DAPO arXiv:2503.14476 (10)
    L_t =  min(L_t, -c A_t) where A_t < 0                     dual clip, arXiv:1912.09729
    """
    logprobs_L, old_L = inputs.clean(inputs.logprobs_L), inputs.clean(inputs.old_L.detach())
    advantages_L = inputs.clean(inputs.advantages_L)
    unclipped_L = -ratio_L * advantages_L
    clipped_L = -ratio_L.clamp(1 - low, 1 + high) * advantages_L
    losses_L = torch.maximum(unclipped_L, clipped_L)
    metrics = {
        "ratio": inputs.mean(ratio_L),
        "clip_fraction": inputs.mean((clipped_L > unclipped_L).to(inputs.weights_L.dtype)),
        "kl_old": inputs.mean(kl(logprobs_L, old_L, "k3")),
    }
    if dual_clip is not None:
        bound_L = torch.where(advantages_L < 0, -dual_clip * advantages_L, torch.inf)
        metrics["dual_clip_fraction"] = inputs.mean((losses_L > bound_L).to(inputs.weights_L.dtype))
        losses_L = torch.minimum(losses_L, bound_L)
    return losses_L, metrics


def total(inputs: LossInputs, losses_L: Tensor, metrics: Metrics, algorithm: AlgorithmConfig) -> tuple[Tensor, Metrics]:
    """The weighted sum of the tokens' losses, with the engine's mismatch corrected and the KL term added.

        ρ_t  = min(exp(old_t - rollout_t), importance_cap), no gradient    truncated importance sampling,
                                                                           fengyao.notion.site/off-policy-rl
        loss = Σ w_t ρ_t L_t + kl.coefficient · Σ v_t KL_t                 with v = w where `kl.mean` is the loss's

    Returns:
        The loss, and the metrics with loss and, where there is an input for it, importance_weight, kl and entropy.

    Raises:
        ValueError: A log-prob that the settings need is missing.
    """
    old_L = inputs.clean(inputs.old_L.detach())
    metrics = dict(metrics)
    if algorithm.importance_cap is not None:
        if inputs.rollout_L is None:
            raise ValueError("algorithm.importance_cap needs the engine's log-probs")
        importance_L = (old_L - inputs.clean(inputs.rollout_L.detach())).clamp(max=LOG_RATIO_LIMIT).exp()
        importance_L = importance_L.clamp(max=algorithm.importance_cap)
        metrics["importance_weight"] = inputs.mean(importance_L)
        losses_L = importance_L * losses_L

    kl_mean = None
    if inputs.reference_L is not None:
        logprobs_L, reference_L = inputs.clean(inputs.logprobs_L), inputs.clean(inputs.reference_L.detach())
        kl_L = kl(logprobs_L, reference_L, algorithm.kl.estimator)
        if inputs.kl_weights_L is None:
            metrics["kl"] = inputs.mean(kl_L)
            losses_L = losses_L + algorithm.kl.coefficient * kl_L
        else:
            kl_mean = (inputs.kl_weights_L * kl_L).sum()
            metrics["kl"] = kl_mean.detach()
    elif algorithm.kl.coefficient > 0:
        raise ValueError("algorithm.kl.coefficient needs the reference's log-probs")

    if inputs.entropy_L is not None:
        metrics["entropy"] = inputs.mean(inputs.clean(inputs.entropy_L))
    loss = (inputs.weights_L * losses_L).sum()
    if kl_mean is not None:
        loss = loss + algorithm.kl.coefficient * kl_mean
    return loss, {"loss": loss.detach(), **metrics}
