"""Advantages: how much better a trajectory did than its group, the samples of one prompt.

Shapes: rewards and advantages [N], groups [N] (any integers; equal ones belong together). A trajectory has one
advantage, which holds for each of its tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from skyrl_mega.config.schema import AlgorithmConfig

STD_EPSILON = 1e-6
"""Added to a group's standard deviation, so that nearly equal rewards do not explode."""


def advantages(rewards_N: Tensor, groups_N: Tensor, algorithm: AlgorithmConfig) -> Tensor:
    """Advantages [N] by the estimator that `algorithm.advantage` names, in the dtype of the rewards."""
    match algorithm.advantage:
        case "grpo":
            return grpo(rewards_N, groups_N, normalize=algorithm.normalize)
        case "rloo":
            return rloo(rewards_N, groups_N)
        case "reinforce":
            return reinforce(rewards_N)
    raise ValueError(f"algorithm.advantage={algorithm.advantage!r}")


def grpo(rewards_N: Tensor, groups_N: Tensor, *, normalize: bool = True) -> Tensor:
    """Group-relative advantages (GRPO, arXiv:2402.03300, section 4.1.2).

        A_i = (r_i - mean(r)) / (std(r) + 1e-6)     with normalize
        A_i =  r_i - mean(r)                        without (Dr. GRPO, arXiv:2503.20783)

    mean and std (n - 1 in the denominator) run over the group of i. A group whose rewards are all equal, also a group
    of one, has advantages of exactly 0: it says nothing about what was better.

    Args:
        rewards_N: float [N].
        groups_N: integers [N].
        normalize: Whether to divide by the standard deviation.
    """
    r, index, count = _grouped(rewards_N, groups_N)
    centred = r - (_sum_by_group(r, index, count) / count)[index]
    centred = torch.where(varied(rewards_N, groups_N), centred, 0.0)  # no rounding residue to divide by a tiny std
    if normalize:
        variance = _sum_by_group(centred.square(), index, count) / (count - 1).clamp(min=1)
        centred = centred / (variance.sqrt() + STD_EPSILON)[index]
    return centred.to(rewards_N.dtype)


def rloo(rewards_N: Tensor, groups_N: Tensor) -> Tensor:
    """Leave-one-out advantages (RLOO, arXiv:2402.14740).

        A_i = r_i - mean(r_j, j ≠ i) = n / (n - 1) · (r_i - mean(r))

    A group of one has no others to compare with and an advantage of 0.
    """
    r, index, count = _grouped(rewards_N, groups_N)
    centred = r - (_sum_by_group(r, index, count) / count)[index]
    centred = torch.where(varied(rewards_N, groups_N), centred, 0.0)
    return (centred * (count / (count - 1).clamp(min=1))[index]).to(rewards_N.dtype)


def reinforce(rewards_N: Tensor) -> Tensor:
    """The reward itself, without a baseline (REINFORCE, Williams 1992, doi:10.1007/BF00992696)."""
    return rewards_N.clone()


def varied(rewards_N: Tensor, groups_N: Tensor) -> Tensor:
    """Whether each trajectory's group has rewards that differ: bool [N]."""
    groups, index = torch.unique(groups_N, return_inverse=True)
    highest = rewards_N.new_zeros(len(groups)).scatter_reduce(0, index, rewards_N, "amax", include_self=False)
    lowest = rewards_N.new_zeros(len(groups)).scatter_reduce(0, index, rewards_N, "amin", include_self=False)
    return (highest > lowest)[index]


def _grouped(rewards_N: Tensor, groups_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards in float64, the group index of each [N], and the groups' sizes [G], float64 too."""
    if rewards_N.shape != groups_N.shape or rewards_N.dim() != 1:
        raise ValueError(f"rewards {tuple(rewards_N.shape)} and groups {tuple(groups_N.shape)} must both be [N]")
    _, index, count = torch.unique(groups_N, return_inverse=True, return_counts=True)
    return rewards_N.double(), index, count.double()


def _sum_by_group(values_N: Tensor, index_N: Tensor, count_G: Tensor) -> Tensor:
    return values_N.new_zeros(len(count_G)).index_add(0, index_N, values_N)
