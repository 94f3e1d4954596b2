"""Estimators that compare a trajectory with the other samples of its prompt.

All of them return exactly 0 for groups with equal rewards and for groups of a single sample: nothing is better.
"""

from __future__ import annotations

import torch
from torch import Tensor

from skyrl_mega.algorithms.advantages.base import STD_EPSILON, AdvantageInputs, beyond_rounding
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import AlgorithmConfig


def grpo(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> Tensor:
    """Returns GRPO advantages [N] (arXiv:2402.03300, section 4.1.2); 0 in a group with equal rewards, or of one sample.

    A_i = (r_i - mean(r)) / (std(r) + 1e-6)     with `algorithm.normalize`; std divides by n - 1
    A_i =  r_i - mean(r)                        without (Dr. GRPO, arXiv:2503.20783)
    """
    centred = inputs.centred()
    if algorithm.normalize:
        variance = inputs.sums(centred.square()) / (inputs.count - 1).clamp(min=1)
        centred = centred / (variance.sqrt() + STD_EPSILON)
    return centred.to(inputs.rewards_N.dtype)


def rloo(inputs: AdvantageInputs, _: AlgorithmConfig) -> Tensor:
    """Returns leave-one-out advantages [N] (RLOO, arXiv:2402.14740); 0 in a group with equal rewards, or of one sample.

    A_i = r_i - mean(r_j, j ≠ i) = n / (n - 1) · (r_i - mean(r))
    """
    n = inputs.count
    return (inputs.centred() * n / (n - 1).clamp(min=1)).to(inputs.rewards_N.dtype)


def opo(inputs: AdvantageInputs, _: AlgorithmConfig) -> Tensor:
    """Returns advantages [N] with the baseline of least variance for gradient norms that grow with length (OPO).

        A_i = r_i - Σ l_j r_j / Σ l_j        l_j: tokens written by the policy

    0 in a group with equal rewards, or of one sample. See arXiv:2505.23585, equation 9.

    Raises:
        ValueError: The numbers of tokens, `tokens_N`, are missing.
    """
    baseline = inputs.sums(inputs.lengths * inputs.r) / inputs.sums(inputs.lengths).clamp(min=1)
    return torch.where(inputs.varied, inputs.r - baseline, 0.0).to(inputs.rewards_N.dtype)


def pass_at_k(inputs: AdvantageInputs, _: AlgorithmConfig) -> Tensor:
    """Returns advantages [N] for the best reward of a group (arXiv:2503.19595, leave-one-out baseline).

    A_i = max(r) - max(r_j, j ≠ i)        nonzero only for a single best sample: its lead over the second best

    0 in a group of one sample.
    """
    count = int(inputs.group.max()) + 1 if len(inputs.group) else 0
    low = inputs.r.new_full((count,), -torch.inf)
    best = low.scatter_reduce(0, inputs.group, inputs.r, "amax")[inputs.group]
    leads = ~beyond_rounding(best - inputs.r, torch.maximum(best.abs(), inputs.r.abs()))
    alone = leads & (inputs.sums(leads.double()) == 1)
    second = low.scatter_reduce(0, inputs.group, inputs.r.masked_fill(leads, -torch.inf), "amax")[inputs.group]
    return torch.where(alone & inputs.varied, best - second, 0.0).to(inputs.rewards_N.dtype)


def maxrl(inputs: AdvantageInputs, _: AlgorithmConfig) -> Tensor:
    """Returns MaxRL advantages [N], as in SkyRL: with more samples, closer to maximum likelihood than the mean reward.

        A_i = (r_i - mean(r)) / (mean(r) + 1e-6)        for rewards of at least 0

    0 in a group with equal rewards, or of one sample.

    Raises:
        UserError: A reward is negative: dividing by such a mean would turn better into worse.
    """
    if bool((inputs.rewards_N < 0).any()):
        raise UserError(
            f"a reward is {inputs.rewards_N.min():g}; allowed are rewards of at least 0, or "
            "another estimator, such as grpo",
            key="algorithm.advantage",
            value="maxrl",
        )
    mean = inputs.sums(inputs.r) / inputs.count
    return (inputs.centred() / (mean + STD_EPSILON)).to(inputs.rewards_N.dtype)


def gpg(inputs: AdvantageInputs, _: AlgorithmConfig) -> Tensor:
    """Returns group policy gradient advantages [N] (GPG, arXiv:2504.02546, equations 6 and 8, with F_norm = 1).

        A_i = N / (N - M) · (r_i - mean(r))        M of the step's N trajectories are in groups with equal rewards

    All 0 if M = N. GPG's loss is -A log π, with the same gradient as `loss=ppo` in the first optimizer step.
    """
    alpha = len(inputs.r) / max(int(inputs.varied.sum()), 1)
    return (alpha * inputs.centred()).to(inputs.rewards_N.dtype)
