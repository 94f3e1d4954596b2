"""Whitening: advantages are scaled to mean 0 and deviation 1, over the policy's tokens in a group or in the whole step.

Each advantage is weighted by its number of tokens, so the advantage of a trajectory counts by the trajectory's length.
"""

from __future__ import annotations

import torch
from torch import Tensor

from skyrl_mega.algorithms.advantages.base import STD_EPSILON, AdvantageInputs, sums_of, varied

EPSILON = 1e-8
"""Added to the variance."""


def whitened(values_M: Tensor, weights_M: Tensor | None = None, group_M: Tensor | None = None) -> Tensor:
    """Returns (x - μ) / sqrt(σ² + 1e-8), with μ = Σ w x / Σ w and σ² = Σ w (x - μ)² / (Σ w - 1): float [M].

    0 for values with weight 0, and for all values if those with a weight are equal.

    Args:
        values_M: float [M].
        weights_M: float [M], multiplicity of each value; None: 1.
        group_M: int64 [M], counted from 0: each group is whitened separately. None: a single group.
    """
    group_M = torch.zeros(len(values_M), dtype=torch.int64) if group_M is None else group_M
    weights_M = torch.ones_like(values_M) if weights_M is None else weights_M
    weight_M = sums_of(weights_M, group_M)
    centred_M = values_M - sums_of(weights_M * values_M, group_M) / weight_M.clamp(min=1)
    variance_M = sums_of(weights_M * centred_M.square(), group_M) / (weight_M - 1).clamp(min=1)
    # Neither rounding nor values without weight count as a deviation: groups of equal values become exactly 0.
    counts_M = weights_M > 0
    differ_M = counts_M.masked_scatter(counts_M, varied(values_M[counts_M], group_M[counts_M]))
    return torch.where(differ_M, centred_M / (variance_M + EPSILON).sqrt(), 0.0)


def apply_whitening(values_M: Tensor, inputs: AdvantageInputs, how: str, *, tokens: bool) -> Tensor:
    """Returns an estimator's advantages whitened by the method `how`: float64 [M].

    Args:
        values_M: float64, a value per trajectory [N] or per token [T].
        inputs: Inputs of the estimator.
        how: `algorithm.whiten`. none: unchanged. group, batch: `whitened` over the tokens of each group, or of the
            step. batch_std: divided by the standard deviation (n - 1, + 1e-6) of the step's rewards (arXiv:2508.08221,
            section 4.2), which keeps zeros; unchanged if all rewards of the step are equal.
        tokens: True if M is T. Only known tokens (`TokenInputs.known_T`) count then.

    Raises:
        ValueError: With group or batch and a value per trajectory, `inputs.tokens_N` is missing.
        UserError: With group or batch and a value per token, `inputs.token_inputs` is missing.
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
