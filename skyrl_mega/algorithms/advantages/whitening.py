"""Advantages brought to mean 0 and deviation 1, over what the policy wrote in a group or in the whole step.

An advantage weighs as many times as there are tokens that have it, so one of a trajectory weighs by its length.
"""

from __future__ import annotations

import torch
from torch import Tensor

from skyrl_mega.algorithms.advantages.base import STD_EPSILON, AdvantageInputs, sums_of, varied

EPSILON = 1e-8
"""Added to the variance."""


def whitened(values_M: Tensor, weights_M: Tensor | None = None, group_M: Tensor | None = None) -> Tensor:
    """(x - μ) / sqrt(σ² + 1e-8), with μ = Σ w x / Σ w and σ² = Σ w (x - μ)² / (Σ w - 1).

    0 where all that count are equal, and for those that do not count.

    Args:
        values_M: float [M].
        weights_M: float [M], how often each counts; None: once.
        group_M: int64 [M], counted from 0: each group is whitened by itself. None: all are one.
    """
    group_M = torch.zeros(len(values_M), dtype=torch.int64) if group_M is None else group_M
    weights_M = torch.ones_like(values_M) if weights_M is None else weights_M
    weight_M = sums_of(weights_M, group_M)
    centred_M = values_M - sums_of(weights_M * values_M, group_M) / weight_M.clamp(min=1)
    variance_M = sums_of(weights_M * centred_M.square(), group_M) / (weight_M - 1).clamp(min=1)
    # Rounding is no deviation, and neither is what has no weight: where all are equal, they become exactly 0.
    counts_M = weights_M > 0
    differ_M = counts_M.masked_scatter(counts_M, varied(values_M[counts_M], group_M[counts_M]))
    return torch.where(differ_M, centred_M / (variance_M + EPSILON).sqrt(), 0.0)


def after(values_M: Tensor, inputs: AdvantageInputs, how: str, *, tokens: bool) -> Tensor:
    """What `algorithm.whiten` makes of an estimator's advantages: float64 [M].

    Args:
        values_M: float64, one of each trajectory [N], or one of each token [T].
        inputs: What they were estimated from.
        how: none. group, batch: `whitened` over the tokens of each group, or of the step. batch_std: divided by the
            standard deviation (n - 1, + 1e-6) of the step's rewards (arXiv:2508.08221, section 4.2), which leaves 0 at
            0; by nothing where the step's rewards are all equal.
        tokens: Whether M is T. Then only those count that something was known of (`TokenInputs.known_T`).
    """
    if how == "none":
        return values_M
    if how == "batch_std":
        differ = bool(varied(inputs.r, torch.zeros_like(inputs.group)).any())
        return values_M / (inputs.r.std() + STD_EPSILON) if differ else values_M
    group_M = inputs.group[inputs.token.trajectory_T] if tokens else inputs.group
    weights_M = inputs.token.known_T if tokens else inputs.lengths
    weights_M = None if weights_M is None else weights_M.double()
    return whitened(values_M, weights_M, group_M if how == "group" else None)
