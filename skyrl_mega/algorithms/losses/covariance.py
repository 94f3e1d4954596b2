"""Clip-Cov and KL-Cov (arXiv:2505.22617): restraint of the few tokens with a high covariance between advantage and
log-prob, which make the entropy fall. `algorithms.selection` selects these tokens over the whole mini-batch."""

from __future__ import annotations

import torch
from torch import Tensor

from skyrl_mega.algorithms.kl import LOG_RATIO_LIMIT, bounded_exp
from skyrl_mega.algorithms.losses.base import LossInputs, Metrics, clipped_surrogate, log_ratio, ratio_metrics, total
from skyrl_mega.config.schema import AlgorithmConfig


def clip_cov(inputs: LossInputs, algorithm: AlgorithmConfig) -> tuple[Tensor, Metrics]:
    """Returns the Clip-Cov loss of a micro-batch, a scalar (`total`): PPO's loss, 0 for selected tokens. Also returns
    the metrics of `clipped_surrogate` and `total`, and covariance_fraction, the share of selected tokens.

    Raises:
        ValueError: `high_covariance_L`, or a column that `total` needs, is missing.
    """
    chosen_L = _chosen(inputs)
    ratio_L = bounded_exp(log_ratio(inputs))
    clips = algorithm.clip_low, algorithm.clip_high, algorithm.dual_clip
    losses_L, metrics = clipped_surrogate(inputs, ratio_L, *clips)
    metrics["covariance_fraction"] = inputs.mean(chosen_L.to(losses_L.dtype))
    return total(inputs, torch.where(chosen_L, 0.0, losses_L), metrics, algorithm)


def kl_cov(inputs: LossInputs, algorithm: AlgorithmConfig) -> tuple[Tensor, Metrics]:
    """Returns the KL-Cov loss of a micro-batch, a scalar (`total`), and the metrics of `ratio_metrics` and `total`, and
    covariance_fraction. With d_t = log π_t - log π_old,t:

        L_t = -exp(d_t) A_t, plus kl_cov.coefficient |d_t| for selected tokens

    Nothing is clipped: clip_fraction is 0. covariance_fraction is the share of selected tokens.

    Raises:
        ValueError: `high_covariance_L`, or a column that `total` needs, is missing.
    """
    chosen_L = _chosen(inputs)
    d_L = log_ratio(inputs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    losses_L = -d_L.exp() * inputs.clean(inputs.advantages_L)
    losses_L = losses_L + torch.where(chosen_L, algorithm.kl_cov.coefficient * d_L.abs(), 0.0)
    metrics = ratio_metrics(inputs, d_L.exp(), torch.zeros_like(chosen_L))
    metrics["covariance_fraction"] = inputs.mean(chosen_L.to(losses_L.dtype))
    return total(inputs, losses_L, metrics, algorithm)


def _chosen(inputs: LossInputs) -> Tensor:
    if inputs.high_covariance_L is None:
        raise ValueError(
            "clip_cov and kl_cov need high_covariance_L, the selected tokens; a run selects them only with "
            "algorithm.loss=clip_cov or kl_cov, not for a loss of your own"
        )
    return inputs.high_covariance_L & inputs.active_L
