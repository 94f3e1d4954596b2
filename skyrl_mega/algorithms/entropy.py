"""The coefficient of the entropy bonus over a run: fixed, or adapted towards a target (Skywork-OR1,
arXiv:2505.22312)."""

from __future__ import annotations

from typing import Any

from skyrl_mega.config.schema.entropy import EntropyConfig


class EntropyCoefficient:
    """Factor of the entropy term in the next RL step.

        c(k + 1) = c(k) + step if the entropy of step k is at most the target, else c(k) - step, within its bounds
        step k + 1 uses c(k + 1), or 0 if the entropy was above the target

    The paper measures the entropy of a step's rollouts before training on them. Here the entropy of the previous
    training step is used, which needs no extra forward pass.
    """

    def __init__(self, config: EntropyConfig) -> None:
        self.config = config
        self.coefficient = config.coefficient
        self.entropy: float | None = None
        """Entropy of the latest step, in nats per token."""

    @property
    def applied(self) -> float:
        """Coefficient in the loss of the next step: 0 if the latest entropy is above the target, else `coefficient`."""
        target = self.config.target
        return 0.0 if target is not None and self.entropy is not None and self.entropy > target else self.coefficient

    @property
    def used(self) -> bool:
        """True if the loss may contain an entropy term: a coefficient or a target is configured."""
        return bool(self.config.coefficient) or self.config.target is not None

    def update(self, entropy: float) -> None:
        """Stores the entropy of a finished step, in nats per token. With a target also raises the coefficient by
        `entropy.step` if the entropy is at most the target, else lowers it, within its bounds."""
        self.entropy = entropy
        if self.config.target is None:
            return
        change = self.config.step if entropy <= self.config.target else -self.config.step
        self.coefficient = min(max(self.coefficient + change, self.config.least), self.config.most)

    def state(self) -> dict[str, Any]:
        """Returns `coefficient` and `entropy` (None before the first step), for a checkpoint and `restore`."""
        return {"coefficient": self.coefficient, "entropy": self.entropy}

    def restore(self, state: dict[str, Any]) -> None:
        """Restores the result of `state`. Without a target does nothing: the coefficient stays as configured, which may
        be new.

        Raises:
            KeyError: With a target, `state` lacks an entry.
        """
        if self.config.target is not None:
            self.coefficient, self.entropy = state["coefficient"], state["entropy"]
