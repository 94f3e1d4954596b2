"""Quantities to compute with the sampling weights, before the first optimizer step of an RL step."""

from __future__ import annotations

from skyrl_mega.algorithms.advantages import needs
from skyrl_mega.algorithms.selection import columns_needed
from skyrl_mega.config.schema import AlgorithmConfig

MEASURED = frozenset({"old_logprobs", "old_entropy", "old_squares"})
"""Columns computed by a forward pass of the policy."""


def columns(algorithm: AlgorithmConfig) -> frozenset[str]:
    """Returns the names of the columns that advantages or the selection of tokens read, perhaps none. The driver
    fetches these columns from the ranks.

    Raises:
        UserError: The estimator cannot be found or imported.
    """
    return columns_needed(algorithm) | needs(algorithm)


def pass_needed(algorithm: AlgorithmConfig, updates: int) -> bool:
    """Returns True if an RL step needs a forward pass of the policy for old log-probs, before the first optimizer step.

    Without the pass, a single optimizer step uses its own log-probs as old log-probs, because the weights are equal;
    and with `algorithm.old_logprobs=engine` the engine's log-probs are the old log-probs.

    Args:
        algorithm: The settings.
        updates: Number of optimizer steps per RL step.

    Raises:
        UserError: The estimator cannot be found or imported.
    """
    return (updates > 1 and algorithm.old_logprobs == "policy") or bool(columns(algorithm) & MEASURED)
