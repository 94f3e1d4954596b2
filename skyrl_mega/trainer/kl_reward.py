"""KL to the reference as part of the reward (`algorithm.kl.where: reward`), with an optionally adaptive coefficient.

Legend: N trajectories, T tokens of all samples.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from skyrl_mega.algorithms.kl import adapted, kl
from skyrl_mega.batch.make_batch import Batch
from skyrl_mega.config.schema import KlConfig


@dataclass
class KlReward:
    """Penalizes trajectories for the distance from the reference: r_t - β k_t (arXiv:1909.08593, (2))."""

    config: KlConfig
    coefficient: float = field(init=False)
    """β of the next step."""

    def __post_init__(self) -> None:
        self.coefficient = self.config.coefficient

    def penalize(self, batch: Batch, *, adapt: bool = True) -> dict[str, float]:
        """Sets `batch.penalty` to β k_t, which advantages subtract from the reward of each policy token, and adapts β
        for the next step.

        k_t is the KL estimate under the sampling weights, without a gradient. k_t = 0 for tokens of filtered
        trajectories, without a weight in the loss. The mean skips trajectories without a token in the loss.

        Args:
            batch: Its tokens include old_logprobs and reference_logprobs.
            adapt: True if β may change; False while the policy itself is not trained.

        Returns:
            Metrics: policy/kl_reward, the mean over trajectories of Σ k_t; policy/kl_coefficient, the step's β.
        """
        kl_T = kl(batch.tokens["old_logprobs"], batch.tokens["reference_logprobs"], self.config.estimator)
        kl_T = torch.where(batch.trained_here, kl_T, 0.0)
        batch.penalty = self.coefficient * kl_T
        measured_N = batch.counts > 0
        count = int(measured_N.sum())
        mean = float(batch.per_trajectory(kl_T)[measured_N].mean()) if count else 0.0
        metrics = {"policy/kl_reward": mean, "policy/kl_coefficient": self.coefficient}
        if adapt and count and self.config.target is not None:
            self.coefficient = adapted(self.coefficient, mean / self.config.target, count, self.config)
        return metrics

    def state(self) -> dict[str, float]:
        """Returns the checkpoint state: an adaptive β as `kl_coefficient`; {} for a fixed β."""
        return {} if self.config.target is None else {"kl_coefficient": self.coefficient}

    def restore(self, state: dict[str, float]) -> None:
        """Sets β to the value in a checkpoint's state. Does nothing if β is fixed by the settings, or the state
        contains no β."""
        if self.config.target is not None and "kl_coefficient" in state:
            self.coefficient = state["kl_coefficient"]
