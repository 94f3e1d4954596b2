"""Estimators that use the reward of each answer: every token has a separate advantage."""

from __future__ import annotations

import torch
from torch import Tensor

from skyrl_mega.algorithms.advantages.base import (
    STD_EPSILON,
    AdvantageInputs,
    beyond_rounding,
    discounted,
    per_token,
    sums_of,
    varied,
)
from skyrl_mega.algorithms.advantages.whitening import whitened
from skyrl_mega.config.schema import AlgorithmConfig


@per_token()
def reinforce_plus_plus(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> Tensor:
    """Returns REINFORCE++ advantages (arXiv:2501.03262): the return from each token on, whitened over all tokens of the
    step.

        G_t = Σ_{k ≥ t} γ^(k-t) r_k        A_t = (G_t - μ) / sqrt(σ² + 1e-8), σ² divides by T - 1

    γ is `algorithm.gamma` and discounts from each of the policy's tokens to the next, ignoring text of the environment
    between two answers.

    Returns:
        float64 [T]; 0 for all tokens if all G_t are equal.

    Raises:
        UserError: The tokens (`token_inputs`) are missing.
    """
    return whitened(inputs.token.returns(algorithm.gamma))


@per_token()
def grpo_turns(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> Tensor:
    """Returns GRPO advantages with process supervision (arXiv:2402.03300, section 4.1.3), treating each answer as a
    step.

        z_j = (r_j - mean(R)) / (std(R) + 1e-6)        R: rewards of all answers of the group
        A_t = Σ z_j over the token's answer and all later answers

    std divides by n - 1; without `algorithm.normalize` there is no division by std.

    Returns:
        float64 [T]. 0 if all R are equal, and if the group's trajectories have equal rewards answer by answer: there is
        nothing to compare.

    Raises:
        UserError: The tokens (`token_inputs`) are missing.
    """
    token = inputs.token
    begins_T = torch.ones(len(token.turn_T), dtype=torch.bool)
    begins_T[1:] = (token.turn_T.diff() != 0) | (token.trajectory_T.diff() != 0)
    answer_T = begins_T.cumsum(0) - 1
    trajectory_R = token.trajectory_T[begins_T]
    rewards_R = inputs.r.new_zeros(len(trajectory_R)).index_add(0, answer_T, token.rewards_T.double())

    group_R = inputs.group[trajectory_R]
    count_R = sums_of(torch.ones_like(rewards_R), group_R)
    mean_R = sums_of(rewards_R, group_R) / count_R
    compared_R = _compared(rewards_R, mean_R, token.turn_T[begins_T], group_R, inputs)
    centred_R = torch.where(compared_R, rewards_R - mean_R, 0.0)
    if algorithm.normalize:
        variance_R = sums_of(centred_R.square(), group_R) / (count_R - 1).clamp(min=1)
        centred_R = centred_R / (variance_R.sqrt() + STD_EPSILON)
    return discounted(centred_R, trajectory_R, 1.0)[answer_T]


def _compared(rewards_R: Tensor, mean_R: Tensor, turn_R: Tensor, group_R: Tensor, inputs: AdvantageInputs) -> Tensor:
    """Returns bool [R]: True if trajectories of the answer's group have different rewards at the same position.

    A missing answer counts as a reward equal to the mean of all.
    """
    place_R = torch.unique(turn_R * len(inputs.r) + group_R, return_inverse=True)[1]
    trajectories_R = inputs.group.bincount()[group_R]
    given_R = sums_of(torch.ones_like(rewards_R), place_R)
    unlike_R = beyond_rounding((rewards_R - mean_R).abs(), torch.maximum(rewards_R.abs(), mean_R.abs()))
    differs_R = varied(rewards_R, place_R) | ((given_R < trajectories_R) & unlike_R)
    return sums_of(differs_R.double(), group_R) > 0
