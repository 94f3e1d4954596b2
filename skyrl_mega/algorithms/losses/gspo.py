"""GSPO (arXiv:2507.18071): PPO's clipped surrogate with a single ratio per answer, from its length-normalised
likelihood."""

from __future__ import annotations

from torch import Tensor

from skyrl_mega.algorithms.losses.base import LossInputs, Metrics, bounded_exp, clipped_surrogate, log_ratio, total
from skyrl_mega.config.schema import AlgorithmConfig


def gspo(inputs: LossInputs, algorithm: AlgorithmConfig) -> tuple[Tensor, Metrics]:
    """Returns the GSPO loss (arXiv:2507.18071). All tokens of an answer y to context x share the ratio of equation 7:

        s = (π(y | x) / π_old(y | x)) ^ (1 / |y|) = exp(mean over y of log π(token) - log π_old(token))

    With `sequence_unit: trajectory`, y is all answers of a trajectory. The ratio is clipped to [1 - gspo.clip_low, 1 +
    gspo.clip_high] as a whole, so all tokens of an answer count or none, if their advantages have one sign. With
    `loss_mean=sequences` and a single answer per trajectory the loss is equation 5. `dual_clip` bounds the loss of
    tokens with a negative advantage. `total` adds the mismatch correction, the entropy bonus and the KL term. Needs
    `sequence_L`.

    Returns:
        The loss of the micro-batch (scalar, summed over tokens), and the metrics of `clipped_surrogate` and `total`.

    Raises:
        AssertionError: `sequence_L` is missing.
        ValueError: Log-probs of the engine or the reference, or the entropy, are required but missing.
    """
    ratio_L = bounded_exp(inputs.sequence_mean(log_ratio(inputs)))
    clips = algorithm.gspo.clip_low, algorithm.gspo.clip_high, algorithm.dual_clip
    losses_L, metrics = clipped_surrogate(inputs, ratio_L, *clips)
    return total(inputs, losses_L, metrics, algorithm)
