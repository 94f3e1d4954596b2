"""Tokens of a mini-batch that a loss treats apart, chosen before it is cut, by the covariance of advantage and log-prob
or by entropy. The driver chooses, with the weights that sampled, so that neither a micro-batch nor a layout decides.

Legend: P tokens of a mini-batch that count in the loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from skyrl_mega.config.schema import AlgorithmConfig

COVARIANCE = "high_covariance"
ENTROPY = "high_entropy"
"""Columns, bool: whether a token is chosen."""


def columns_needed(algorithm: AlgorithmConfig) -> frozenset[str]:
    """Columns of the mini-batches that have to be computed with the weights that sampled, before anything is chosen."""
    by_logprobs = algorithm.loss in ("clip_cov", "kl_cov") or algorithm.importance_normalize
    names = {"old_logprobs"} if by_logprobs else set()
    return frozenset(names | ({"old_entropy"} if algorithm.entropy.top_share < 1 else set()))


def covariance(advantages_P: Tensor, logprobs_P: Tensor) -> Tensor:
    """(A - mean of A) (log π - mean of log π), over the tokens of the mini-batch: float64 [P] (2505.22617, eq. 10)."""
    advantages_P, logprobs_P = advantages_P.double(), logprobs_P.double()
    return (advantages_P - advantages_P.mean()) * (logprobs_P - logprobs_P.mean())


def clipped_by_covariance(
    covariance_P: Tensor, *, share: float, low: float, high: float, seed: Sequence[int]
) -> Tensor:
    """Clip-Cov's tokens (arXiv:2505.22617, equation 11): bool [P].

    Of those whose covariance is from `low` to `high`, so many are drawn as `share` of all are, at least 1.
    """
    candidates = ((covariance_P >= low) & (covariance_P <= high)).nonzero()[:, 0]
    count = min(max(int(share * len(covariance_P)), 1), len(candidates))
    drawn = np.random.default_rng(seed).permutation(len(candidates))[:count]
    chosen_P = torch.zeros(len(covariance_P), dtype=torch.bool)
    chosen_P[candidates[torch.from_numpy(drawn)]] = True
    return chosen_P


def punished_by_covariance(covariance_P: Tensor, *, share: float) -> Tensor:
    """KL-Cov's tokens (arXiv:2505.22617, equation 12): bool [P], the `share` of highest covariance, at least 1."""
    return _highest(covariance_P, max(int(share * len(covariance_P)), 1))


def high_entropy(entropy_P: Tensor, *, share: float) -> Tensor:
    """The `share` of tokens of highest entropy, rounded up (arXiv:2506.01939, section 5): bool [P]."""
    return _highest(entropy_P, math.ceil(share * len(entropy_P)))


def _highest(values_P: Tensor, count: int) -> Tensor:
    """bool [P]: the `count` largest; of equal ones the first."""
    chosen_P = torch.zeros(len(values_P), dtype=torch.bool)
    chosen_P[values_P.sort(descending=True, stable=True).indices[:count]] = True
    return chosen_P
