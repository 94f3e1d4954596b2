"""KL to the reference as a part of the reward (`algorithm.kl.where: reward`), with a coefficient that may adapt.

Legend: N trajectories, T tokens of all their samples.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from skyrl_mega.algorithms.kl import adapted, kl
from skyrl_mega.config.schema import KlConfig
from skyrl_mega.trainer.batch import Batch


@dataclass
class KlReward:
    """Punishes a step's trajectories for their distance from the reference: r_t - β k_t (arXiv:1909.08593, (2))."""

    config: KlConfig
    coefficient: float = field(init=False)
    """β of the next step."""

    def __post_init__(self) -> None:
        self.coefficient = self.config.coefficient

    def punish(self, batch: Batch, *, adapt: bool = True) -> dict[str, float]:
        """Takes β k_t from the reward of each token that the policy wrote, and adapts β for the next step.

        k_t is the estimate at the weights that sampled, without a gradient. Tokens without a weight in the loss (those
        of filtered trajectories) have 0, and trajectories without a token that counts are in no mean.

        Args:
            batch: With old_logprobs and reference_logprobs.
            adapt: Whether β changes: not while the policy itself does not.

        Returns:
            Metrics: policy/kl_reward, the mean over trajectories of Σ k_t; policy/kl_coefficient, the step's β.
        """
        kl_T = kl(batch["old_logprobs"], batch["reference_logprobs"], self.config.estimator)
        kl_T = torch.where(batch.own, kl_T, 0.0)
        batch.penalty = self.coefficient * kl_T
        measured_N = batch.per_trajectory(batch["mask"]) > 0
        count = int(measured_N.sum())
        mean = float(batch.per_trajectory(kl_T)[measured_N].mean()) if count else 0.0
        metrics = {"policy/kl_reward": mean, "policy/kl_coefficient": self.coefficient}
        if adapt and count and self.config.target is not None:
            self.coefficient = adapted(self.coefficient, mean / self.config.target, count, self.config)
        return metrics

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps: β, where it adapts."""
        return {} if self.config.target is None else {"kl_coefficient": self.coefficient}

    def restore(self, state: dict[str, float]) -> None:
        """Goes on with the β of a checkpoint, which has one where it was written by a run whose β adapted."""
        if self.config.target is not None and "kl_coefficient" in state:
            self.coefficient = state["kl_coefficient"]
