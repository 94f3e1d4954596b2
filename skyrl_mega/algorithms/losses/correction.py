"""Correction of a loss for the mismatch between the engine's and the policy's log-probs.

Offers importance sampling, truncated (TIS) or masked (MIS, both fengyao.notion.site/off-policy-rl and
yingru.notion.site), and rejection of tokens or of whole answers or trajectories (`algorithm.sequence_unit`). IcePop is
both, with the cap equal to the upper rejection bound.

With d_t = log π_old(token) - log π_engine(token), the ratio is one of

    token      exp(d_t)
    sequence   exp(Σ d over the answer)
    geometric  exp(mean of d over the answer)

Uncapped, the product over a whole trajectory makes the gradient unbiased, at a high variance. The product over a single
answer of several does not: it ignores that the engine also sampled the earlier answers, which the text depends on, and
the later answers, which earned the reward. The other two ratios are biased as soon as two log-probs differ.
"""

from __future__ import annotations

import torch
from torch import Tensor

from skyrl_mega.algorithms.kl import bounded_exp
from skyrl_mega.algorithms.losses.inputs import LossInputs, Metrics
from skyrl_mega.config.schema import AlgorithmConfig


def correction(inputs: LossInputs, algorithm: AlgorithmConfig) -> tuple[Tensor | None, Metrics]:
    """Returns the factor of every token's loss, without gradient: [L], or None without a correction; and its metrics.

    The factor is the importance weight, and 0 for rejected tokens, which stay in the denominator of the loss's mean.
    Metrics: importance_weight, importance_clipped_fraction, rejected_fraction, outlier_fraction, off_policy_fraction;
    only of the parts that are on; {} without a correction. All parts but ratios per token need `sequence_L`.

    Raises:
        ValueError: A part is on, and the engine's log-probs are missing.
    """
    rejection = algorithm.rejection
    outliers = rejection.outlier_low is not None or rejection.outlier_high is not None
    if algorithm.importance_cap is None and rejection.level == "off" and not outliers and rejection.off_policy is None:
        return None, {}
    if inputs.rollout_L is None:
        raise ValueError("algorithm.importance_cap and algorithm.rejection need the engine's log-probs")
    gap_L = inputs.clean(inputs.old_L.detach()) - inputs.clean(inputs.rollout_L.detach())
    weight_L = torch.ones_like(gap_L)
    metrics: Metrics = {}
    if algorithm.importance_cap is not None:
        weight_L, metrics = _importance(inputs, gap_L, algorithm)
    rejected: dict[str, Tensor] = {}
    if rejection.level != "off":
        rejected["rejected_fraction"] = _outside(_ratio(inputs, gap_L, rejection.level), rejection.low, rejection.high)
    if outliers:
        far_L = _outside(_ratio(inputs, gap_L, "token"), rejection.outlier_low, rejection.outlier_high)
        rejected["outlier_fraction"] = inputs.sequence_sum(far_L.to(gap_L.dtype)) > 0
    if rejection.off_policy is not None:
        rejected["off_policy_fraction"] = _off_policy(inputs, rejection.off_policy)
    for name, rejected_L in rejected.items():
        metrics[name] = inputs.mean(rejected_L.to(inputs.weights_L.dtype))
        weight_L = weight_L.masked_fill(rejected_L, 0.0)
    return weight_L, metrics


def importance_mean(inputs: LossInputs, algorithm: AlgorithmConfig) -> float:
    """Returns Σ w_t ρ_t / Σ w_t over a whole mini-batch, the divisor of `algorithm.importance_normalize`; 1 if all ρ
    are 0.

    Args:
        inputs: All tokens of the mini-batch, with `rollout_L`, and `figures` as by default.
        algorithm: The settings of ρ, the importance weight; `importance_cap` is set.

    Raises:
        AssertionError: The engine's log-probs, `rollout_L`, are missing.
    """
    assert inputs.rollout_L is not None
    gap_L = inputs.clean(inputs.old_L.detach()) - inputs.clean(inputs.rollout_L.detach())
    weight_L, _ = _importance(inputs, gap_L, algorithm)
    weights_L = inputs.weights_L.double()
    return float((weights_L * weight_L).sum() / weights_L.sum().clamp(min=1e-12)) or 1.0


def _importance(inputs: LossInputs, gap_L: Tensor, algorithm: AlgorithmConfig) -> tuple[Tensor, Metrics]:
    """Returns ρ, the ratio of `importance_level`, clamped to [importance_floor, importance_cap] or set to 0 outside.

    Divided by its mean if `importance_normalize` is on; the metric is taken before this division.
    """
    ratio_L = _ratio(inputs, gap_L, algorithm.importance_level)
    floor, cap = algorithm.importance_floor, algorithm.importance_cap
    outside_L = _outside(ratio_L, floor, cap)
    masked = algorithm.importance_outside == "mask"
    weight_L = ratio_L.masked_fill(outside_L, 0.0) if masked else ratio_L.clamp(floor, cap)
    metrics = {
        "importance_weight": inputs.mean(weight_L),
        "importance_clipped_fraction": inputs.mean(outside_L.to(inputs.weights_L.dtype)),
    }
    return weight_L / inputs.figures.importance_mean, metrics


def _off_policy(inputs: LossInputs, most: float) -> Tensor:
    """Returns True if A < 0 and the mean of log π_engine - log π over the answer is above `most` (2512.02556, section
    3.1)."""
    assert inputs.rollout_L is not None
    away_L = inputs.clean(inputs.rollout_L.detach()) - inputs.clean(inputs.logprobs_L.detach())
    return (inputs.sequence_mean(away_L) > most) & (inputs.clean(inputs.advantages_L) < 0)


def _outside(ratio_L: Tensor, low: float | None, high: float | None) -> Tensor:
    """Returns True for ratios below `low` or above `high`; None is no bound."""
    below_L = torch.zeros_like(ratio_L, dtype=torch.bool) if low is None else ratio_L < low
    return below_L if high is None else below_L | (ratio_L > high)


def _ratio(inputs: LossInputs, gap_L: Tensor, level: str) -> Tensor:
    of_level = {"token": lambda gap: gap, "sequence": inputs.sequence_sum, "geometric": inputs.sequence_mean}
    return bounded_exp(of_level[level](gap_L))
