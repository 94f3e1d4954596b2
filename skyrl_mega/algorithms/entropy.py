"""The entropy bonus's coefficient over a run, fixed or moved towards a target (Skywork-OR1, arXiv:2505.22312)."""

from __future__ import annotations

from typing import Any

from skyrl_mega.config.schema import EntropyConfig


class EntropyCoefficient:
    """What the entropy is multiplied by in the next RL step.

        c(k + 1) = c(k) + step where the entropy of step k is at most the target, else c(k) - step, within its bounds
        the next step has c(k + 1) there, and 0 where the entropy was above the target

    The paper measures the entropy of a step's rollouts before it trains on them; here it is the step before's, as it
    trained, which needs no forward pass of its own.
    """

    def __init__(self, config: EntropyConfig) -> None:
        self.config = config
        self.coefficient = config.coefficient
        self.entropy: float | None = None
        """Of the newest step, nats per token."""

    @property
    def applied(self) -> float:
        """What the loss has: the coefficient, or 0 while the entropy is above the target."""
        target = self.config.target
        return 0.0 if target is not None and self.entropy is not None and self.entropy > target else self.coefficient

    @property
    def used(self) -> bool:
        """Whether the loss may have an entropy term."""
        return bool(self.config.coefficient) or self.config.target is not None

    def see(self, entropy: float) -> None:
        """A step had this entropy."""
        self.entropy = entropy
        if self.config.target is None:
            return
        change = self.config.step if entropy <= self.config.target else -self.config.step
        self.coefficient = min(max(self.coefficient + change, self.config.least), self.config.most)

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"coefficient": self.coefficient, "entropy": self.entropy}

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on from a checkpoint's state; without a target the coefficient is the setting's, which may be new."""
        if self.config.target is not None:
            self.coefficient, self.entropy = state["coefficient"], state["entropy"]
