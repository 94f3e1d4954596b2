"""What a step has to know of the weights that sampled, before its first optimizer step."""

from __future__ import annotations

from skyrl_mega.algorithms.advantages import needs
from skyrl_mega.algorithms.selection import columns_needed
from skyrl_mega.config.schema import AlgorithmConfig

MEASURED = frozenset({"old_logprobs", "old_entropy", "old_squares"})
"""Columns that a forward pass of the policy makes."""


def columns(algorithm: AlgorithmConfig) -> frozenset[str]:
    """Columns that advantages, or the choice of tokens, are made from: the driver fetches them.

    Raises:
        UserError: The estimator cannot be found.
    """
    return columns_needed(algorithm) | needs(algorithm)


def pass_needed(algorithm: AlgorithmConfig, updates: int) -> bool:
    """Whether a step makes a forward pass for its old log-probs. Without one, the only optimizer step trains with the
    weights that sampled and finds its own as it trains, or ratios are to the engine's.

    Args:
        algorithm: The settings.
        updates: Optimizer steps of one RL step.

    Raises:
        UserError: The estimator cannot be found.
    """
    return (updates > 1 and algorithm.old_logprobs == "policy") or bool(columns(algorithm) & MEASURED)
