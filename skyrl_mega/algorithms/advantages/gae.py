"""Generalized advantage estimation: rewards relative to a critic's expectation.

Legend: T tokens written by the policy, trajectory by trajectory; N trajectories with at least one token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from skyrl_mega.algorithms.advantages.base import AdvantageInputs, per_token
from skyrl_mega.config.schema import AlgorithmConfig


@per_token("values")
def gae(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> Tensor:
    """Returns GAE (arXiv:1506.02438, equations 11 and 16) over the tokens written by the policy.

        δ_t = r_t + γ V_{t+1} - V_t        A_t = δ_t + γ λ A_{t+1}

    t + 1 is the policy's next token in the trajectory, even if it belongs to the next answer: text of the environment
    in between is part of the state and takes no time. After a trajectory's last token V and A are 0.

    γ is `algorithm.gamma`, λ is `algorithm.gae.lam`.

    Returns:
        float64 [T], before whitening. The critic's returns are these advantages plus the values.

    Raises:
        ValueError: The critic's values are missing.
        UserError: The tokens (`token_inputs`) are missing.
    """
    token, gamma, lam = inputs.token, algorithm.gamma, algorithm.gae.lam
    if token.values_T is None:
        raise ValueError("gae needs a critic's values")
    values_T = token.values_T.double()
    lengths_N = torch.unique_consecutive(token.trajectory_T, return_counts=True)[1]
    order_N = lengths_N.argsort(descending=True)
    ends_N, longest = lengths_N.cumsum(0)[order_N] - 1, lengths_N[order_N].tolist()
    following_T = torch.zeros_like(values_T)
    following_T[:-1] = values_T[1:]
    following_T[ends_N] = 0.0
    advantages_T = token.rewards_T.double() + gamma * following_T - values_T
    active = len(longest)
    for back in range(1, longest[0] if longest else 0):  # from last to first token, for all trajectories at once
        while longest[active - 1] <= back:
            active -= 1
        index = ends_N[:active] - back
        advantages_T[index] += gamma * lam * advantages_T[index + 1]
    return advantages_T
