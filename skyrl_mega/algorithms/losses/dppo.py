"""DPPO (arXiv:2602.04879): a trust region on the movement of each token's distribution.

PPO's bound on the ratio stops a rare token at once and lets a frequent token move far.
"""

from __future__ import annotations

import torch
from torch import Tensor

from skyrl_mega.algorithms.losses.base import LossInputs, Metrics, bounded_exp, log_ratio, ratio_metrics, total
from skyrl_mega.config.schema import AlgorithmConfig

TINY = 1e-12
"""Lower bound on the probability of all other tokens together, before the logarithm."""


def dppo_tv(inputs: LossInputs, algorithm: AlgorithmConfig) -> tuple[Tensor, Metrics]:
    """Returns the DPPO loss of a micro-batch (arXiv:2602.04879), a scalar, and metrics, with the binary total
    variation.

    With μ and π the old and the present probability of the sampled token,

        L_t = -M_t r_t A_t,  r_t = π / μ
        M_t = 0 where A_t > 0 and π - μ > dppo.tv_high, or A_t < 0 and μ - π > dppo.tv_low;  else 1

    μ is the engine's probability with `old_logprobs=engine`, as in the paper. clip_fraction is the share of M_t = 0.
    `total` adds the mismatch correction, the entropy bonus and the KL term.

    Raises:
        ValueError: Log-probs of the engine or the reference, or the entropy, are required but missing.
    """
    old_L, now_L = _probabilities(inputs)
    return _masked(inputs, (now_L - old_L).abs(), algorithm.dppo.tv_low, algorithm.dppo.tv_high, algorithm)


def dppo_kl(inputs: LossInputs, algorithm: AlgorithmConfig) -> tuple[Tensor, Metrics]:
    """Returns the loss and metrics of `dppo_tv`, with another mask: the KL between two outcomes, this token and any
    other, is bounded if r moves along A.

    D_t = μ log(μ / π) + (1 - μ) log((1 - μ) / (1 - π))
    M_t = 0 where A_t > 0, r_t > 1 and D_t > dppo.kl_high, or A_t < 0, r_t < 1 and D_t > dppo.kl_low;  else 1

    Raises:
        ValueError: Log-probs of the engine or the reference, or the entropy, are required but missing.
    """
    old_L, now_L = _probabilities(inputs)
    others_old_L, others_now_L = ((1 - p_L).clamp(min=TINY) for p_L in (old_L, now_L))
    divergence_L = old_L * -log_ratio(inputs).detach() + (1 - old_L) * (others_old_L / others_now_L).log()
    return _masked(inputs, divergence_L, algorithm.dppo.kl_low, algorithm.dppo.kl_high, algorithm)


def _probabilities(inputs: LossInputs) -> tuple[Tensor, Tensor]:
    """Returns μ and π of each token without gradient, in float64: otherwise 1 - π is lost to rounding."""
    old_L, now_L = inputs.clean(inputs.old_L.detach()), inputs.clean(inputs.logprobs_L.detach())
    return old_L.double().exp().clamp(max=1), now_L.double().exp().clamp(max=1)


def _masked(
    inputs: LossInputs, distance_L: Tensor, low: float, high: float, algorithm: AlgorithmConfig
) -> tuple[Tensor, Metrics]:
    advantages_L = inputs.clean(inputs.advantages_L)
    d_L = log_ratio(inputs)
    risen_L = (advantages_L > 0) & (d_L > 0) & (distance_L > high)
    fallen_L = (advantages_L < 0) & (d_L < 0) & (distance_L > low)
    left_out_L = risen_L | fallen_L
    ratio_L = bounded_exp(d_L)
    losses_L = torch.where(left_out_L, 0.0, -ratio_L * advantages_L)
    return total(inputs, losses_L, ratio_metrics(inputs, ratio_L, left_out_L), algorithm)
