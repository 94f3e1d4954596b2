"""Estimators that compare a trajectory with all other trajectories of the step, or use no comparison."""

from __future__ import annotations

from torch import Tensor

from skyrl_mega.algorithms.advantages.base import AdvantageInputs
from skyrl_mega.algorithms.advantages.whitening import whitened
from skyrl_mega.config.schema import AlgorithmConfig


def reinforce(inputs: AdvantageInputs, _: AlgorithmConfig) -> Tensor:
    """Returns a copy of the rewards [N] as advantages, without a baseline (REINFORCE, Williams 1992,
    doi:10.1007/BF00992696)."""
    return inputs.rewards_N.clone()


def reinforce_plus_plus_baseline(inputs: AdvantageInputs, _: AlgorithmConfig) -> Tensor:
    """Returns the advantages of REINFORCE++ with the group's mean as baseline (arXiv:2501.03262), whitened over all
    tokens of the step.

        A_i = (x_i - μ) / sqrt(σ² + 1e-8)      x = r - mean(r) of its group;  l: tokens written by the policy
        μ = Σ l x / Σ l,  σ² = Σ l (x - μ)² / (Σ l - 1)

    Returns:
        [N], in the dtype of the rewards; 0 for all trajectories if all x are equal.

    Raises:
        ValueError: The numbers of tokens, `tokens_N`, are missing.
    """
    return whitened(inputs.centred(), inputs.lengths).to(inputs.rewards_N.dtype)
