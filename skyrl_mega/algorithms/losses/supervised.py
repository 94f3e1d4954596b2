"""Cross-entropy of given tokens, for the warm-up on demonstrations."""

from __future__ import annotations

from torch import Tensor

from skyrl_mega.algorithms.losses.base import LossInputs, Metrics
from skyrl_mega.config.schema import AlgorithmConfig


def supervised(inputs: LossInputs, algorithm: AlgorithmConfig) -> tuple[Tensor, Metrics]:
    """Returns the cross-entropy -Σ w_t log π(token) of a micro-batch, and the metrics loss and, with `entropy_L`,
    entropy. Ignores all settings."""
    loss = -(inputs.weights_L * inputs.clean(inputs.logprobs_L)).sum()
    metrics = {"loss": loss.detach()}
    if inputs.entropy_L is not None:
        metrics["entropy"] = inputs.mean(inputs.clean(inputs.entropy_L))
    return loss, metrics
