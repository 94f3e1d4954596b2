"""A separate baseline for each token: the mean of the group's returns, weighted by the influence on the policy.

Legend: T tokens written by the policy, trajectory by trajectory; K tokens with known log-probs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from skyrl_mega.algorithms.advantages.base import AdvantageInputs, discounted, per_token, sums_of, varied
from skyrl_mega.config.schema import AlgorithmConfig


@per_token("old_logprobs", "old_squares")
def optimal_token_baseline(inputs: AdvantageInputs, _: AlgorithmConfig) -> Tensor:
    """Returns advantages with the baseline of least variance for the t-th tokens of a group (arXiv:2602.07078).

        A_t = G_t - B_t        B_t = Σ G_t W_t / Σ W_t, over the trajectories with a t-th token
        W_t = Σ_{j ≤ t} (1 - 2 π_j + Σ_v π_j(v)²)

    G_t is the return from the token on, without discount, whatever `algorithm.gamma` is. A term of W_t is the squared
    length of the gradient of log π_j by the logits, where π_j is the token's probability. t counts the policy's own
    tokens; text of the environment between two answers is skipped.

    Returns:
        float64 [T] for the policy's own tokens, as in `TokenInputs`. 0 if all G_t are equal, thus also if no other
        trajectory is as long; if all W_t are 0, so no trajectory could have moved the policy yet; and for unknown
        tokens (`TokenInputs.known_T`).

    Raises:
        ValueError: `old_T` or `squares_T` is missing.
        UserError: The tokens (`token_inputs`) are missing.
    """
    token = inputs.token
    if token.old_T is None or token.squares_T is None:
        raise ValueError(
            "optimal_token_baseline needs log-probs (token.old_T), and sums of squared probabilities "
            '(token.squares_T); mark an estimator that calls it with @per_token("old_logprobs", "old_squares")'
        )
    known_T = torch.ones_like(token.trajectory_T, dtype=torch.bool) if token.known_T is None else token.known_T
    # Rounding may make a term negative for a token with probability 1.
    moved_T = (1 - 2 * token.old_T.double().exp() + token.squares_T.double()).clamp(min=0)
    weight_K = _so_far(torch.where(known_T, moved_T, 0.0), token.trajectory_T)[known_T]
    return_K = token.returns(1.0)[known_T]

    place_T = _so_far(torch.ones_like(token.trajectory_T), token.trajectory_T)
    key_K = (place_T * len(inputs.r) + inputs.group[token.trajectory_T])[known_T]
    at_K = torch.unique(key_K, return_inverse=True)[1]
    total_K = sums_of(weight_K, at_K)
    differs_K = (total_K > 0) & varied(return_K, at_K)
    baseline_K = sums_of(return_K * weight_K, at_K) / torch.where(total_K > 0, total_K, 1.0)
    found_K = torch.where(differs_K, return_K - baseline_K, 0.0)
    return torch.zeros_like(moved_T).masked_scatter(known_T, found_K)


def _so_far(values_T: Tensor, trajectory_T: Tensor) -> Tensor:
    """Returns the running sum within a trajectory up to and including each token: [T]."""
    return discounted(values_T.flip(0), trajectory_T.flip(0), 1).flip(0)
