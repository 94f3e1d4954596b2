"""Schulman's estimators of KL(policy ‖ reference) from sampled tokens (joschu.net/blog/kl-approx.html).

With d = log reference(token) - log policy(token), for a token drawn from the policy:

    k1 = -d              unbiased, high variance, may be negative
    k2 = d² / 2          biased, low variance
    k3 = exp(d) - 1 - d  unbiased, low variance, never negative

As a term of the loss, what counts is the gradient of the estimate (arXiv:2506.09477). On tokens of the policy itself
its expectation is 0 for k1 (it bounds nothing), that of KL(policy ‖ reference) for k2, and that of KL(reference ‖
policy) for k3, GRPO's choice.
"""

from __future__ import annotations

from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped here: exp of a larger one overflows, and one token would make every gradient NaN."""


def kl(logprobs_T: Tensor, reference_T: Tensor, estimator: str) -> Tensor:
    """Per-token estimates [T], differentiable in `logprobs_T`.

    Args:
        logprobs_T: The policy's log-probs, natural log.
        reference_T: The reference's log-probs of the same tokens.
        estimator: "k1", "k2" or "k3".
    """
    difference = (reference_T - logprobs_T).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    match estimator:
        case "k1":
            return -difference
        case "k2":
            return difference.square() / 2
        case "k3":
            return difference.expm1() - difference
    raise ValueError(f"algorithm.kl.estimator={estimator!r}")
