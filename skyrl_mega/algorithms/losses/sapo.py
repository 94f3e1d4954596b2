"""SAPO (arXiv:2511.20347): a smooth gate in place of the clip, steeper for negative advantages."""

from __future__ import annotations

import torch
from torch import Tensor

from skyrl_mega.algorithms.losses.base import LossInputs, Metrics, bounded_exp, log_ratio, ratio_metrics, total
from skyrl_mega.config.schema import AlgorithmConfig


def sapo(inputs: LossInputs, algorithm: AlgorithmConfig) -> tuple[Tensor, Metrics]:
    """Returns the SAPO loss of a micro-batch (arXiv:2511.20347, equations 5 and 6), a scalar, and the metrics of
    `ratio_metrics` and `total`.

    For a token with r_t = π_t / π_old,t:

        L_t = -(4 / τ) σ(τ (r_t - 1)) A_t        τ = sapo.temperature_positive where A_t > 0, else temperature_negative

    The gradient is REINFORCE's times 4 σ (1 - σ) r_t: 1 at r_t = 1, fading on both sides. The paper's mean is
    `loss_mean=sequences`. clip_fraction is the share of tokens with 4 σ (1 - σ) below one half. `total` adds the
    mismatch correction, the entropy bonus and the KL term.

    Raises:
        ValueError: Log-probs of the engine or the reference, or the entropy, are required but missing.
    """
    ratio_L = bounded_exp(log_ratio(inputs))
    advantages_L, settings = inputs.clean(inputs.advantages_L), algorithm.sapo
    positive, negative = (ratio_L.new_tensor(t) for t in (settings.temperature_positive, settings.temperature_negative))
    tau_L = torch.where(advantages_L > 0, positive, negative)
    gate_L = torch.sigmoid(tau_L * (ratio_L - 1))
    faded_L = 4 * gate_L * (1 - gate_L) < 0.5
    return total(inputs, -4 / tau_L * gate_L * advantages_L, ratio_metrics(inputs, ratio_L, faded_L), algorithm)
