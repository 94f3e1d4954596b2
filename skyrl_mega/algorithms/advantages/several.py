"""An estimator for environments that give several rewards."""

from __future__ import annotations

import torch
from torch import Tensor

from skyrl_mega.algorithms.advantages.base import STD_EPSILON, AdvantageInputs, varied
from skyrl_mega.config.schema import AlgorithmConfig

EPSILON = 1e-6
"""Added to the step's standard deviation."""
ROUNDING = 1e-8
"""A sum of normalised rewards this small is one whose parts cancel."""


def gdpo(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> Tensor:
    """GDPO (arXiv:2601.05242, section 3): each reward is normalised in its group before they are added up.

        A_i = Σ_k w_k (r_ik - mean(r_k)) / (std(r_k) + 1e-6)        in the group, w from `algorithm.reward_weights`
        Â_i = (A_i - mean(A)) / (std(A) + 1e-6)                     over the step's trajectories

    std has n - 1 in its denominator. A reward that is equal in the whole group adds exactly 0. mean(A) is 0: the sum of
    each group is. With a single reward, without names, it is GRPO's, normalised once more. Rewards that cancel leave
    rounding, which is taken for 0.
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
