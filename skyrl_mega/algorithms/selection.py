"""Selection of tokens with a special role in the loss, by the covariance of advantage and log-prob or by entropy.

The driver selects over the whole mini-batch, with the sampling weights, so the result depends neither on micro-batches
nor on the layout.

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
"""Names of columns, bool: True for selected tokens."""


def columns_needed(algorithm: AlgorithmConfig) -> frozenset[str]:
    """Returns the names of the columns that the selection reads, computed under the weights that sampled the tokens;
    perhaps none."""
    by_logprobs = algorithm.loss_traits.covariance or algorithm.importance_normalize
    names = {"old_logprobs"} if by_logprobs else set()
    return frozenset(names | ({"old_entropy"} if algorithm.entropy.top_share < 1 else set()))


def covariance(advantages_P: Tensor, logprobs_P: Tensor) -> Tensor:
    """Returns (A - mean of A) (log π - mean of log π) over the tokens of the mini-batch (arXiv:2505.22617, equation
    10): float64 [P], empty without tokens."""
    advantages_P, logprobs_P = advantages_P.double(), logprobs_P.double()
    return (advantages_P - advantages_P.mean()) * (logprobs_P - logprobs_P.mean())


def clipped_by_covariance(
    covariance_P: Tensor, *, share: float, low: float, high: float, seed: Sequence[int]
) -> Tensor:
    """Returns a bool tensor [P] on the CPU: True for the tokens that Clip-Cov (arXiv:2505.22617, equation 11) leaves
    out of the gradient.

    Draws `share` of all P tokens, rounded down but at least 1, at random from the tokens with a covariance from `low`
    to `high`; all of these if they are fewer, so none if there are none. Equal seeds draw equally.

    Args:
        covariance_P: Covariance of each token, on the CPU.
        share: Share of the tokens to draw.
        low: Lower limit of the covariance, inclusive.
        high: Upper limit of the covariance, inclusive.
        seed: Seed of the draw.
    """
    candidates = ((covariance_P >= low) & (covariance_P <= high)).nonzero()[:, 0]
    count = min(max(int(share * len(covariance_P)), 1), len(candidates))
    drawn = np.random.default_rng(seed).permutation(len(candidates))[:count]
    chosen_P = torch.zeros(len(covariance_P), dtype=torch.bool)
    chosen_P[candidates[torch.from_numpy(drawn)]] = True
    return chosen_P


def punished_by_covariance(covariance_P: Tensor, *, share: float) -> Tensor:
    """Returns True for the tokens of KL-Cov (arXiv:2505.22617, equation 12): bool [P], the `share` of tokens with the
    highest covariance, rounded down but at least 1; ties go to the first. Without tokens the result is empty."""
    return _highest(covariance_P, max(int(share * len(covariance_P)), 1))


def high_entropy(entropy_P: Tensor, *, share: float) -> Tensor:
    """Returns True for the `share` of tokens with the highest entropy, rounded up; ties go to the first
    (arXiv:2506.01939, section 5): bool [P]."""
    return _highest(entropy_P, math.ceil(share * len(entropy_P)))


def _highest(values_P: Tensor, count: int) -> Tensor:
    """Returns bool [P]: True for the `count` largest values; ties go to the first."""
    chosen_P = torch.zeros(len(values_P), dtype=torch.bool)
    chosen_P[values_P.sort(descending=True, stable=True).indices[:count]] = True
    return chosen_P
