"""Quantities to compute with the sampling weights, before the first optimizer step of an RL step."""

from __future__ import annotations

from skyrl_mega.algorithms.advantages import needs
from skyrl_mega.algorithms.selection import columns_needed
from skyrl_mega.config.schema import AlgorithmConfig

MEASURED = frozenset({"old_logprobs", "old_entropy", "old_squares"})
"""Columns computed by a forward pass of the policy."""


def columns(algorithm: AlgorithmConfig) -> frozenset[str]:
    """Returns the names of the columns that advantages or the selection of tokens read; empty without any. The driver
    fetches these columns from the ranks.

    Raises:
        UserError: The advantage estimator cannot be found or imported.
    """
    return columns_needed(algorithm) | needs(algorithm)


def pass_needed(algorithm: AlgorithmConfig, updates: int) -> bool:
    """Returns True if an RL step needs a separate forward pass of the policy, before the first optimizer step.

    The pass is needed in two cases: for several optimizer steps with `algorithm.old_logprobs=policy`; and for any
    number of steps if advantages or the selection of tokens read a column of `MEASURED`, as with KL in the reward or
    `algorithm.entropy.top_share` below 1. Without the pass, a single optimizer step uses its own log-probs as old
    log-probs, because the weights are equal; `algorithm.old_logprobs=engine` uses the engine's log-probs.

    Args:
        algorithm: The settings.
        updates: Number of optimizer steps per RL step.

    Raises:
        UserError: The advantage estimator, asked for its columns, cannot be found or imported.
    """
    return (updates > 1 and algorithm.old_logprobs == "policy") or bool(columns(algorithm) & MEASURED)
