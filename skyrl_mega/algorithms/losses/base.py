"""Definition of a loss, and the shared parts of policy losses.

    Loss = (LossInputs, AlgorithmConfig) → (the micro-batch's loss, summed over its tokens; metrics)

Every token has a weight fixed before the mini-batch is cut (`token_weights`). The loss of a mini-batch is the plain sum
of the losses of its micro-batches, and so is the gradient: neither depends on micro-batch size, packing or parallel
layout. A loss keeps this property if it is a sum over tokens of `weights_L` times values that depend on the token
alone, or on its sequence through `sequence_mean`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from skyrl_mega.algorithms.kl import bounded_exp, kl
from skyrl_mega.algorithms.losses.correction import correction
from skyrl_mega.algorithms.losses.inputs import LossInputs, Metrics
from skyrl_mega.config.schema import AlgorithmConfig

Loss = Callable[[LossInputs, AlgorithmConfig], tuple[Tensor, Metrics]]
"""A loss: returns the loss of a micro-batch, a scalar summed over its tokens, and metrics."""


def log_ratio(inputs: LossInputs) -> Tensor:
    """Returns log π(token) - log π_old(token) [L], differentiable, not clamped; 0 for tokens with weight 0."""
    return inputs.clean(inputs.logprobs_L) - inputs.clean(inputs.old_L.detach())


def ratio_metrics(inputs: LossInputs, ratio_L: Tensor, clipped_L: Tensor) -> Metrics:
    """Returns the metrics ratio, clip_fraction and kl_old, scalars without gradient: the k3 estimate of KL(π_old ‖ π),
    as π_old sampled the tokens.

    Args:
        inputs: The tokens.
        ratio_L: The loss's version of π / π_old; finite also at tokens with weight 0.
        clipped_L: bool, True for tokens with a ratio of no or reduced effect.
    """
    logprobs_L, old_L = inputs.clean(inputs.logprobs_L.detach()), inputs.clean(inputs.old_L.detach())
    return {
        "ratio": inputs.mean(ratio_L),
        "clip_fraction": inputs.mean(clipped_L.to(inputs.weights_L.dtype)),
        "kl_old": inputs.mean(kl(old_L, logprobs_L, "k3")),
    }


def clipped_surrogate(
    inputs: LossInputs, ratio_L: Tensor, low: float, high: float, dual_clip: float | None
) -> tuple[Tensor, Metrics]:
    """Returns PPO's unweighted loss of every token [L], and the metrics ratio, clip_fraction, kl_old and
    dual_clip_fraction. `dual_clip` is c; None: no dual clip, and no dual_clip_fraction. `ratio_L` is finite also at
    tokens with weight 0 (`log_ratio`).

    L_t = -min(r_t A_t, clip(r_t, 1 - low, 1 + high) A_t)     PPO arXiv:1707.06347 (7), DAPO arXiv:2503.14476 (10)
    L_t =  min(L_t, -c A_t) where A_t < 0                     dual clip, arXiv:1912.09729
    """
    advantages_L = inputs.clean(inputs.advantages_L)
    unclipped_L = -ratio_L * advantages_L
    clipped_L = -ratio_L.clamp(1 - low, 1 + high) * advantages_L
    losses_L = torch.maximum(unclipped_L, clipped_L)
    metrics = ratio_metrics(inputs, ratio_L, clipped_L > unclipped_L)
    if dual_clip is not None:
        bound_L = torch.where(advantages_L < 0, -dual_clip * advantages_L, torch.inf)
        metrics["dual_clip_fraction"] = inputs.mean((losses_L > bound_L).to(inputs.weights_L.dtype))
        losses_L = torch.minimum(losses_L, bound_L)
    return losses_L, metrics


def total(inputs: LossInputs, losses_L: Tensor, metrics: Metrics, algorithm: AlgorithmConfig) -> tuple[Tensor, Metrics]:
    """Returns the loss of a micro-batch: the weighted sum of the token losses, minus the entropy bonus, plus the KL
    term.

        loss = Σ w_t (ρ_t L_t - c H_t) + kl.coefficient · Σ v_t KL_t

        w_t   `weights_L`, the averaging of `algorithm.loss_mean`
        v_t   `kl_weights_L`, the averaging of `kl.mean`; w_t if `kl.mean` is loss
        L_t   `losses_L`, finite at every token; 0 outside of `high_entropy_L`, if given (arXiv:2506.01939)
        ρ_t   factor against the mismatch between engine and policy (`correction`)
        H_t   the policy's entropy in nats; c is `figures.entropy_coefficient`, if None `entropy.coefficient`
        KL_t  estimate of `kl.estimator`; times π_t / π_old,t with `kl.unbiased` (arXiv:2512.02556, equation 7)

    The KL term is present only if `kl.where` is loss and `reference_L` is given.

    Returns:
        The loss, a scalar, and `metrics` with further entries: loss; those of `correction`; high_entropy_fraction if
        `high_entropy_L` is given; kl if the KL term is present; entropy if `entropy_L` is given.

    Raises:
        ValueError: The log-probs of the engine or the reference, or the policy's entropy, are required but missing.
    """
    weight_L, corrected = correction(inputs, algorithm)
    metrics = metrics | corrected
    if weight_L is not None:
        losses_L = weight_L * losses_L
    if inputs.high_entropy_L is not None:
        metrics["high_entropy_fraction"] = inputs.mean(inputs.high_entropy_L.to(losses_L.dtype))
        losses_L = torch.where(inputs.high_entropy_L, losses_L, 0.0)

    kl_mean = None
    if inputs.reference_L is not None and algorithm.kl.where == "loss":
        logprobs_L, reference_L = inputs.clean(inputs.logprobs_L), inputs.clean(inputs.reference_L.detach())
        kl_L = kl(logprobs_L, reference_L, algorithm.kl.estimator)
        if algorithm.kl.unbiased:
            kl_L = kl_L * bounded_exp(log_ratio(inputs))
        if inputs.kl_weights_L is None:
            metrics["kl"] = inputs.mean(kl_L)
            losses_L = losses_L + algorithm.kl.coefficient * kl_L
        else:
            kl_mean = (inputs.kl_weights_L * kl_L).sum()
            metrics["kl"] = kl_mean.detach()
    elif algorithm.kl.in_loss > 0:
        raise ValueError("algorithm.kl.coefficient needs the reference's log-probs")

    bonus = inputs.figures.entropy_coefficient
    bonus = algorithm.entropy.coefficient if bonus is None else bonus
    if inputs.entropy_L is not None:
        entropy_L = inputs.clean(inputs.entropy_L)
        metrics["entropy"] = inputs.mean(entropy_L)
        if bonus:
            losses_L = losses_L - bonus * entropy_L
    elif bonus:
        raise ValueError("algorithm.entropy.coefficient needs the policy's entropy")
    loss = (inputs.weights_L * losses_L).sum()
    if kl_mean is not None:
        loss = loss + algorithm.kl.coefficient * kl_mean
    return loss, {"loss": loss.detach(), **metrics}
