"""GMPO (arXiv:2507.20673): the geometric mean of an answer's clipped ratios, which limits the effect of a
single token."""

from __future__ import annotations

import torch
from torch import Tensor

from skyrl_mega.algorithms.losses.base import LossInputs, Metrics, bounded_exp, log_ratio, ratio_metrics, total
from skyrl_mega.config.schema import AlgorithmConfig


def gmpo(inputs: LossInputs, algorithm: AlgorithmConfig) -> tuple[Tensor, Metrics]:
    """Returns the GMPO loss (arXiv:2507.20673, equation 4): the geometric mean of an answer's clipped ratios, times -A.

        L = -A exp(mean over y of m_t)      y: the answer, or the trajectory (`sequence_unit`)
        m_t = min(d_t, gmpo.clip_high)      if A > 0
        m_t = max(d_t, -gmpo.clip_low)      if A < 0
        d_t = log π_t - log π_old,t

    So the clip bounds d_t only from the side that the advantage pushes to, as in PPO. With `loss_mean=sequences` and a
    single answer per trajectory this equals the paper's loss. `total` adds the mismatch correction, the entropy bonus
    and the KL term. Needs `sequence_L`.

    Returns:
        The loss of the micro-batch (scalar, summed over tokens), and the metrics of `ratio_metrics` and `total`.

    Raises:
        AssertionError: `sequence_L` is missing.
        ValueError: Log-probs of the engine or the reference, or the entropy, are required but missing.
    """
    d_L = log_ratio(inputs)
    advantages_L = inputs.clean(inputs.advantages_L)
    sign_L = advantages_L.sign()
    bounded_L = d_L.clamp(-algorithm.gmpo.clip_low, algorithm.gmpo.clip_high)
    pessimist_L = sign_L * torch.minimum(sign_L * d_L, sign_L * bounded_L)
    ratio_L = bounded_exp(inputs.sequence_mean(pessimist_L))
    clipped_L = (pessimist_L != d_L) & (advantages_L != 0)
    return total(inputs, -ratio_L * advantages_L, ratio_metrics(inputs, ratio_L, clipped_L), algorithm)
