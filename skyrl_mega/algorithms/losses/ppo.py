"""PPO's clipped surrogate with a ratio per token, and with the bounds of DAPO and dual clip."""

from __future__ import annotations

from torch import Tensor

from skyrl_mega.algorithms.losses.base import LossInputs, Metrics, bounded_exp, clipped_surrogate, log_ratio, total
from skyrl_mega.config.schema import AlgorithmConfig


def ppo(inputs: LossInputs, algorithm: AlgorithmConfig) -> tuple[Tensor, Metrics]:
    """Returns the PPO loss of a micro-batch, a scalar, and the metrics of `clipped_surrogate` and `total`.

    For a token with r_t = π_t / π_old,t:

        L_t = -min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)
        L_t = min(L_t, -dual_clip A_t)      where A_t < 0, with `dual_clip`

    `total` adds the mismatch correction, the entropy bonus and the KL term.

    Raises:
        ValueError: Log-probs of the engine or the reference, or the entropy, are required but missing.
    """
    ratio_L = bounded_exp(log_ratio(inputs))
    clips = algorithm.clip_low, algorithm.clip_high, algorithm.dual_clip
    losses_L, metrics = clipped_surrogate(inputs, ratio_L, *clips)
    return total(inputs, losses_L, metrics, algorithm)
