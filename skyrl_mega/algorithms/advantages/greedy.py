"""The estimator that compares a trajectory with a greedy answer to the same prompt."""

from __future__ import annotations

import torch
from torch import Tensor

from skyrl_mega.algorithms.advantages.base import AdvantageInputs
from skyrl_mega.config.schema import AlgorithmConfig


def remax(inputs: AdvantageInputs, _: AlgorithmConfig) -> Tensor:
    """Returns ReMax advantages [N] (arXiv:2310.10505, equation 5): the baseline is the reward of the policy's greedy
    answer.

        A_i = r_i - r(greedy)        exactly 0 without a greedy answer, for example after a failed environment

    Raises:
        ValueError: `greedy_N` is None. A `greedy_N` of NaN everywhere is not an error: all advantages are 0.
    """
    if inputs.greedy_N is None:
        raise ValueError("remax needs greedy_N")
    lead = inputs.r - inputs.greedy_N.double()
    return torch.where(inputs.greedy_N.isnan(), 0.0, lead).to(inputs.rewards_N.dtype)
