"""PPO's clipped surrogate with a ratio per token, and with the bounds of DAPO and dual clip."""

from __future__ import annotations

from torch import Tensor

from skyrl_mega.algorithms.kl import LOG_RATIO_LIMIT
from skyrl_mega.algorithms.losses.base import LossInputs, Metrics, clipped_surrogate, log_ratio, total
from skyrl_mega.config.schema import AlgorithmConfig


def ppo(inputs: LossInputs, algorithm: AlgorithmConfig) -> tuple[Tensor, Metrics]:
    """Returns the PPO loss of a micro-batch, a scalar, and the metrics of `clipped_surrogate` and `total`.

    The ratio r_t = π(token) / π_old(token) is clipped to [1 - clip_low, 1 + clip_high]. See `clipped_surrogate` and
    `total` for the formulae.

    Raises:
        ValueError: As in `total`: required log-probs or the entropy are missing.
    """
    ratio_L = log_ratio(inputs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    clips = algorithm.clip_low, algorithm.clip_high, algorithm.dual_clip
    losses_L, metrics = clipped_surrogate(inputs, ratio_L, *clips)
    return total(inputs, losses_L, metrics, algorithm)
