"""GSPO (arXiv:2507.18071): PPO's clipped surrogate with one ratio for a whole answer, of its length-normalised
likelihood."""

from __future__ import annotations

from torch import Tensor

from skyrl_mega.algorithms.kl import LOG_RATIO_LIMIT
from skyrl_mega.algorithms.losses.base import LossInputs, Metrics, clipped_surrogate, log_ratio, total
from skyrl_mega.config.schema import AlgorithmConfig


def gspo(inputs: LossInputs, algorithm: AlgorithmConfig) -> tuple[Tensor, Metrics]:
    """All tokens of an answer y to what the policy saw, x, or of all answers y of a trajectory (`sequence_unit`), have
    the ratio of equation 7:

        s = (π(y | x) / π_old(y | x)) ^ (1 / |y|) = exp(mean over y of log π(token) - log π_old(token))

    It is clipped to [1 - gspo.clip_low, 1 + gspo.clip_high] as a whole, so that an answer counts with all of its tokens
    or with none. With `loss_mean=sequences` and one answer a trajectory the loss is equation 5; see `total` for what is
    added.
    """
    mean_L = inputs.sequence_mean(log_ratio(inputs))
    ratio_L = mean_L.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    clips = algorithm.gspo.clip_low, algorithm.gspo.clip_high, algorithm.dual_clip
    losses_L, metrics = clipped_surrogate(inputs, ratio_L, *clips)
    return total(inputs, losses_L, metrics, algorithm)
