"""The estimator for environments with several rewards."""

from __future__ import annotations

import torch
from torch import Tensor

from skyrl_mega.algorithms.advantages.base import STD_EPSILON, AdvantageInputs, varied
from skyrl_mega.config.schema import AlgorithmConfig

EPSILON = 1e-6
"""Added to the standard deviation of the step."""
ROUNDING = 1e-8
"""Sums of normalised rewards below this magnitude count as 0: their parts cancel."""


def gdpo(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> Tensor:
    """Returns GDPO advantages (arXiv:2601.05242, section 3): each reward is normalised in its group before the
    summation.

        A_i = Σ_k w_k (r_ik - mean(r_k)) / (std(r_k) + 1e-6)        in the group, w from `algorithm.reward_weights`
        Â_i = (A_i - mean(A)) / (std(A) + 1e-6)                     over the step's trajectories

    std divides by n - 1. A reward without an entry in `algorithm.reward_weights` has weight 1. A reward with equal
    values in the whole group adds exactly 0. mean(A) is 0, because each group sums to 0. With a single unnamed reward
    this is GRPO, normalised a second time. With named rewards, `rewards_N` is not read. Rewards that cancel leave
    rounding, which is set to 0.

    Returns:
        [N], in the dtype of the rewards; 0 for all trajectories if all A are 0.
    """
    total_N = torch.zeros_like(inputs.r)
    for name, rewards_N in (inputs.named or {"reward": inputs.r}).items():
        r = rewards_N.double()
        centred = torch.where(varied(r, inputs.groups_N), r - inputs.sums(r) / inputs.count, 0.0)
        variance = inputs.sums(centred.square()) / (inputs.count - 1).clamp(min=1)
        total_N += algorithm.reward_weights.get(name, 1.0) * centred / (variance.sqrt() + STD_EPSILON)
    total_N = torch.where(total_N.abs() > ROUNDING, total_N, 0.0)
    if not bool(total_N.any()):
        return total_N.to(inputs.rewards_N.dtype)
    return (total_N / (total_N.std() + EPSILON)).to(inputs.rewards_N.dtype)
