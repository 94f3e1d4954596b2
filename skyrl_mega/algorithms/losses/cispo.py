"""CISPO (MiniMax-M1, arXiv:2506.13585): REINFORCE with a clipped importance weight, so that every token has a
gradient."""

from __future__ import annotations

from torch import Tensor

from skyrl_mega.algorithms.losses.base import LossInputs, Metrics, bounded_exp, log_ratio, ratio_metrics, total
from skyrl_mega.config.schema import AlgorithmConfig


def cispo(inputs: LossInputs, algorithm: AlgorithmConfig) -> tuple[Tensor, Metrics]:
    """Returns the CISPO loss of a micro-batch (arXiv:2506.13585, equations 4 and 5), a scalar, and the metrics of
    `ratio_metrics` and `total`. For a token:

        L_t = -sg(clip(r_t, 1 - cispo.clip_low, 1 + cispo.clip_high)) A_t log π_t        r_t = π_t / π_old,t

    sg stops the gradient. Equation 4's mean is `loss_mean=tokens`. `total` adds the mismatch correction, the entropy
    bonus and the KL term.

    Raises:
        ValueError: Log-probs of the engine or the reference, or the entropy, are required but missing.
    """
    ratio_L = bounded_exp(log_ratio(inputs).detach())
    weight_L = ratio_L.clamp(1 - algorithm.cispo.clip_low, 1 + algorithm.cispo.clip_high)
    losses_L = -weight_L * inputs.clean(inputs.advantages_L) * inputs.clean(inputs.logprobs_L)
    return total(inputs, losses_L, ratio_metrics(inputs, ratio_L, weight_L != ratio_L), algorithm)
