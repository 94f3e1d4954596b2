"""The critic, and the advantages that are estimated with its values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

from skyrl_mega.config.schema.fields import MOST, at_least, between
from skyrl_mega.config.schema.policy import LayoutConfig, OptimizerConfig


@dataclass
class GaeConfig:
    """Setting of `advantage: gae` (arXiv:1506.02438), over the tokens that the policy wrote; its discount is
    `algorithm.gamma`, and PPO whitens with `algorithm.whiten: batch`."""

    lam: float = between(0, 1, 0.95)
    """λ: 1 takes what was earned from a token on, less the critic's value; 0 only what the next value says."""


@dataclass
class CriticConfig:
    """The critic: the model with a value head, on ranks of its own. It exists only with `algorithm.advantage: gae`.

    What is not set here of its model (`spec`, `moe`, `recompute`, `options`, …) is the policy's.
    """

    path: Optional[str] = None
    """A Hugging Face directory with the weights that it starts from; None takes the policy's, as they are after the
    supervised warm-up. A value head in it (`score.weight`, as reward models have one) is taken too; without one every
    value is 0 at the start."""
    ranks: Optional[int] = between(1, MOST, None)
    """Its processes (GPUs); None takes as many as the policy has."""
    layout: Optional[LayoutConfig] = None
    """How it is cut; None cuts it as the policy."""
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))
    """AdamW and its schedule."""
    micro_tokens: Optional[int] = at_least(1, None)
    """As `policy.micro_tokens`; None takes that."""
    value_clip: Optional[float] = at_least(0, 0.2)
    """A value may move so far from the one at the start of the RL step before its loss is that of the bound, which has
    no gradient; None does not clip."""
    warmup_steps: int = at_least(0, 0)
    """RL steps at the start in which only the critic learns."""
    epochs: int = at_least(1, 1)
    """Times that it goes over a step's mini-batches; the policy has `data.epochs_per_step`."""
