"""Schulman's estimators of KL(policy ‖ reference) from sampled tokens (joschu.net/blog/kl-approx.html).

With d = log reference(token) - log policy(token), for a token drawn from the policy:

    k1 = -d              unbiased, high variance, may be negative
    k2 = d² / 2          biased, low variance
    k3 = exp(d) - 1 - d  unbiased, low variance, never negative
    abs = |d|            no KL; bounds each token alike
    k3+                  k3 with the gradient of k2

As a term of the loss, what counts is the gradient of the estimate (arXiv:2506.09477). On tokens of the policy itself
its expectation is 0 for k1 (it bounds nothing), that of KL(policy ‖ reference) for k2, and that of KL(reference ‖
policy) for k3, GRPO's choice.
"""

from __future__ import annotations

from torch import Tensor

from skyrl_mega.config.schema import KlConfig

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped here: exp of a larger one overflows, and one token would make every gradient NaN."""


MOST_CHANGE = 0.2
"""How far from the target counts as far, whatever it is."""


def adapted(coefficient: float, of_target: float, trajectories: int, config: KlConfig) -> float:
    """The coefficient that brings KL nearer to its target (arXiv:1909.08593, section 2.2).

    β ← β (1 + clip(KL / target - 1, ±0.2) · n / horizon), at least halved and at most doubled

    The bounds are this project's: with n past 5 horizons β would become 0, and stay so.

    Args:
        coefficient: β.
        of_target: KL / target; KL is the mean over answers of the sum over their tokens.
        trajectories: n, those that were measured.
        config: Has the horizon, in trajectories.
    """
    error = min(max(of_target - 1, -MOST_CHANGE), MOST_CHANGE)
    return coefficient * min(max(0.5, 1 + error * trajectories / config.horizon), 2.0)


def kl(logprobs_T: Tensor, reference_T: Tensor, estimator: str) -> Tensor:
    """Per-token estimates [T], differentiable in `logprobs_T`.

    Args:
        logprobs_T: The policy's log-probs, natural log.
        reference_T: The reference's log-probs of the same tokens.
        estimator: "k1", "k2", "k3", "abs" or "k3+".
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
