"""What is done about the policy's entropy beside the loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from skyrl_mega.config.schema.fields import at_least, between


@dataclass
class EntropyConfig:
    """The entropy bonus, the loss less `coefficient` times the mean entropy of the policy's tokens, in nats; and which
    tokens are learned from."""

    coefficient: float = at_least(0, 0.0)
    """0 has no bonus. With `target` the one of the first step. Published runs take 1e-4 to 1e-2."""
    target: Optional[float] = at_least(0, None)
    """Adapts the coefficient (Skywork-OR1, arXiv:2505.22312): after an RL step with an entropy of at most the target,
    nats per token, it grows by `step`, after another one it falls by it, and has no effect until the entropy is at the
    target again. None keeps it. Skywork-OR1 has 0.2; it does nothing where it lies below a run's entropy."""
    step: float = at_least(0, 0.005)
    """Of `target`: by how much the coefficient changes."""
    least: float = at_least(0, 0.0)
    """Of `target`: the coefficient is never below."""
    most: float = at_least(0, 1.0)
    """Of `target`: the coefficient is never above."""
    top_share: float = between(0, 1, 1.0)
    """The policy loss is that of so many tokens, those of highest entropy of the mini-batch before the step
    (arXiv:2506.01939, which has 0.2); the others count as 0 in its mean and keep their KL and entropy terms. 1 takes
    all."""
