"""From rewards to a loss."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

from skyrl_mega.config.schema.fields import at_least, between, one_of


@dataclass
class KlConfig:
    """KL to the reference, in the loss."""

    coefficient: float = at_least(0, 0.0)
    """0 needs no reference."""
    estimator: str = one_of("k3", "k1", "k2")
    """Schulman's estimators (joschu.net/blog/kl-approx.html)."""
    mean: str = one_of("loss", "tokens", "sequences")
    """What the KL term is the mean over. loss: as `algorithm.loss_mean`; tokens and sequences: as there. SkyRL's KL
    term is a mean over sequences, whatever the policy loss is."""


@dataclass
class DynamicSamplingConfig:
    """DAPO: resample until every group of the batch has rewards that differ."""

    enabled: bool = False
    """Whether groups with zero variance are replaced."""
    max_rounds: int = at_least(1, 10)
    """Generation rounds for one step at most; past it the step takes the groups it has, and says so where that
    is at most half of them."""


@dataclass
class OverlongConfig:
    """DAPO: what happens to responses near or past the length limit."""

    filter: bool = False
    """Truncated trajectories are masked out of the loss."""
    buffer: int = at_least(0, 0)
    """Tokens before the limit over which the punishment grows linearly; 0 turns it off."""
    penalty: float = at_least(0, 1.0)
    """Punishment at the limit."""


@dataclass
class GspoConfig:
    """The clip range of `loss: gspo` (arXiv:2507.18071, section 5.1), whose ratio is a mean over an answer's tokens."""

    clip_low: float = between(0, 1, 3e-4)
    """An answer's ratio is clipped below 1 - clip_low."""
    clip_high: float = at_least(0, 4e-4)
    """An answer's ratio is clipped above 1 + clip_high."""


@dataclass
class AlgorithmConfig:
    """From rewards to a loss."""

    advantage: str = one_of("grpo", "rloo", "reinforce")
    """How a trajectory's advantage comes from its group."""
    normalize: bool = True
    """GRPO divides by the group's standard deviation."""
    loss: str = "ppo"
    """What is minimised: ppo, gspo (one ratio for all tokens of an answer), or your own function of (LossInputs,
    AlgorithmConfig) by import path (`package.module:function` or `path/to/file.py:function`)."""
    gspo: GspoConfig = field(default_factory=GspoConfig)
    """The clip range of gspo, which does not look at `clip_low` and `clip_high`."""
    clip_low: float = between(0, 1, 0.2)
    """Ratio is clipped below 1 - clip_low."""
    clip_high: float = at_least(0, 0.2)
    """Ratio is clipped above 1 + clip_high."""
    dual_clip: Optional[float] = at_least(1, None)
    """Bound c of dual-clip PPO (arXiv:1912.09729) for negative advantages; None is off."""
    loss_mean: str = one_of("tokens", "sequences", "micro_batches")
    """tokens: over all tokens of the mini-batch; sequences: per-sequence token mean, then over sequences;
    micro_batches: token mean over every `loss_mean_samples` samples, then over these groups. That is what programs
    compute that take the token mean of each micro-batch (SkyRL's `token_mean` of 2025, `token_mean_legacy` today). Here
    the groups are fixed: the loss does not depend on `policy.micro_tokens`."""
    loss_mean_samples: Optional[int] = at_least(1, None)
    """Of `loss_mean=micro_batches`, which needs it: samples of one group, the micro-batch of the run that is
    reproduced. Samples that follow one another in the mini-batch make a group; a trajectory is one sample, also with
    `rollout.step_wise`. A group without a token to learn from counts as one whose loss is 0."""
    importance_cap: Optional[float] = at_least(0, None)
    """Token-level truncated importance sampling of the engine's mismatch, capped here; None is off."""
    kl: KlConfig = field(default_factory=KlConfig)
    """KL to the reference."""
    dynamic_sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)
    """Resampling of groups without signal."""
    overlong: OverlongConfig = field(default_factory=OverlongConfig)
    """Length limit handling."""
