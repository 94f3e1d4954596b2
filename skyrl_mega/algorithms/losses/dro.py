"""DRO (arXiv:2405.19107), as in verl: REINFORCE plus a squared distance from the old policy, without clipping."""

from __future__ import annotations

import torch
from torch import Tensor

from skyrl_mega.algorithms.kl import LOG_RATIO_LIMIT
from skyrl_mega.algorithms.losses.base import LossInputs, Metrics, log_ratio, ratio_metrics, total
from skyrl_mega.config.schema import AlgorithmConfig


def dro(inputs: LossInputs, algorithm: AlgorithmConfig) -> tuple[Tensor, Metrics]:
    """Returns the DRO loss of a micro-batch (arXiv:2405.19107), a scalar, and the metrics of `ratio_metrics` and
    `total`. For a token with d_t = log π_t - log π_old,t:

        L_t = -A_t log π_t + dro.strength / 2 · d_t²

    The gradient equals that of the paper's squared error (A - β log π / π_ref)² / 2 over β, with the old policy as the
    reference. clip_fraction is 0. `total` adds the mismatch correction, the entropy bonus and the KL term.

    Raises:
        ValueError: Log-probs of the engine or the reference, or the entropy, are required but missing.
    """
    d_L = log_ratio(inputs)
    bounded_L = d_L.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    losses_L = -inputs.clean(inputs.advantages_L) * inputs.clean(inputs.logprobs_L)
    losses_L = losses_L + algorithm.dro.strength / 2 * bounded_L.square()
    metrics = ratio_metrics(inputs, bounded_L.exp(), torch.zeros_like(inputs.active_L))
    return total(inputs, losses_L, metrics, algorithm)
