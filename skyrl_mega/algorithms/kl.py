"""Schulman's estimators of KL(policy ‖ reference) from sampled tokens (joschu.net/blog/kl-approx.html).

With d = log reference(token) - log policy(token), for a token sampled from the policy:

    k1 = -d              unbiased, high variance, may be negative
    k2 = d² / 2          biased, low variance
    k3 = exp(d) - 1 - d  unbiased, low variance, never negative
    abs = |d|            no KL; bounds each token alike
    k3+                  k3 with the gradient of k2

As a term of the loss, only the gradient of the estimate matters (arXiv:2506.09477). On the policy's own tokens its
expectation is 0 for k1 (no bound at all), the gradient of KL(policy ‖ reference) for k2, and the gradient of
KL(reference ‖ policy) for k3, GRPO's choice.
"""

from __future__ import annotations

from torch import Tensor

from skyrl_mega.config.schema import KlConfig

LOG_RATIO_LIMIT = 20.0
"""Bound on log-ratios: exp of a larger value overflows, and a single token would turn every gradient into NaN."""


def bounded_exp(log_ratios: Tensor) -> Tensor:
    """Returns exp of log-ratios clamped to ±`LOG_RATIO_LIMIT`, with the shape of `log_ratios`; differentiable."""
    return log_ratios.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


MAX_CHANGE = 0.2
"""Largest relative distance from the target that the adaptation uses."""


def adapted(coefficient: float, of_target: float, trajectories: int, config: KlConfig) -> float:
    """Returns the coefficient that brings KL closer to its target (arXiv:1909.08593, section 2.2).

        β ← β (1 + clip(KL / target - 1, ±0.2) · n / horizon), at least halved and at most doubled

    The bounds are an addition of this project: with n above 5 horizons β could become 0 and stay 0.

    Args:
        coefficient: β.
        of_target: KL / target; KL is the mean over answers of the sum over tokens.
        trajectories: n, the number of measured trajectories.
        config: Contains the horizon, in trajectories.
    """
    error = min(max(of_target - 1, -MAX_CHANGE), MAX_CHANGE)
    return coefficient * min(max(0.5, 1 + error * trajectories / config.horizon), 2.0)


def kl(logprobs_T: Tensor, reference_T: Tensor, estimator: str) -> Tensor:
    """Returns per-token estimates of KL(policy ‖ reference) [T], differentiable in `logprobs_T`.

    Args:
        logprobs_T: The policy's log-probs, natural log, of tokens sampled from the policy.
        reference_T: The reference's log-probs of the same tokens.
        estimator: With d = reference - policy, clamped to ±20, one of "k1" (-d), "k2" (d² / 2), "k3" (exp(d) - 1 - d),
            "abs" (|d|), "k3+" (k3 with the gradient of k2).

    Raises:
        ValueError: The estimator is unknown.
    """
    difference = (reference_T - logprobs_T).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    match estimator:
        case "k1":
            return -difference
        case "k2":
            return difference.square() / 2
        case "k3":
            return difference.expm1() - difference
        case "abs":
            return difference.abs()
        case "k3+":
            k2, k3 = difference.square() / 2, difference.expm1() - difference
            return k2 - k2.detach() + k3.detach()
    raise ValueError(f"algorithm.kl.estimator={estimator!r}")
