"""Settings of the critic and of generalized advantage estimation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

from skyrl_mega.config.schema.fields import MOST, at_least, between
from skyrl_mega.config.schema.policy import LayoutConfig, OptimizerConfig


@dataclass
class GaeConfig:
    """Settings of `advantage: gae` (arXiv:1506.02438) over the policy's tokens. The discount is `algorithm.gamma`; PPO
    also whitens (`algorithm.whiten: batch`)."""

    lam: float = between(0, 1, 0.95)
    """λ: 1 uses the return from a token onwards minus the critic's value; 0 uses only the critic's next value."""


@dataclass
class CriticConfig:
    """Critic: the model with a value head, on separate ranks. Exists only with `algorithm.advantage: gae`.

    All model settings not listed here (`spec`, `moe`, `recompute`, `options`, …) are taken from the policy.
    """

    path: Optional[str] = None
    """Hugging Face directory of the initial weights; null copies the policy after the supervised warm-up. A value head
    in this directory (`score.weight`, as in reward models) is loaded as well; without a value head every initial value
    is 0."""
    ranks: Optional[int] = between(1, MOST, None)
    """Number of processes (GPUs); null uses as many as the policy."""
    layout: Optional[LayoutConfig] = None
    """Parallel layout of the critic; null uses the policy's layout."""
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))
    """AdamW with a schedule."""
    micro_tokens: Optional[int] = at_least(1, None)
    """Token budget of a micro-batch; null uses `policy.micro_tokens`."""
    value_clip: Optional[float] = at_least(0, 0.2)
    """Largest change of a value since the start of the RL step. Beyond this bound the loss is evaluated at the bound
    and has no gradient; null does not clip."""
    warmup_steps: int = at_least(0, 0)
    """Number of RL steps at the start that train only the critic."""
    epochs: int = at_least(1, 1)
    """Training passes of the critic over a step's mini-batches; the policy uses `data.epochs_per_step`."""
