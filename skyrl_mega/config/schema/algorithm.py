"""From rewards to a loss."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

from skyrl_mega.config.schema.corrections import RejectionConfig
from skyrl_mega.config.schema.critic import GaeConfig
from skyrl_mega.config.schema.entropy import EntropyConfig
from skyrl_mega.config.schema.fields import at_least, between, one_of
from skyrl_mega.config.schema.losses import ClipCovConfig, DppoConfig, DroConfig, KlCovConfig
from skyrl_mega.config.schema.samples import DynamicSamplingConfig, OverlongConfig


@dataclass
class KlConfig:
    """KL to the reference, in the loss or in the reward."""

    coefficient: float = at_least(0, 0.0)
    """0 needs no reference."""
    estimator: str = one_of("k3", "k1", "k2", "abs", "k3+")
    """Schulman's estimators (joschu.net/blog/kl-approx.html); abs: the distance of the log-probs; k3+: k3 with the
    gradient of k2, which is KL(policy ‖ reference)'s."""
    unbiased: bool = False
    """Multiplies the estimate by π / π_old (arXiv:2512.02556): without it, it is biased once the policy has moved from
    where the tokens were drawn."""
    mean: str = one_of("loss", "tokens", "sequences")
    """What the KL term is the mean over. loss: as `algorithm.loss_mean`; tokens and sequences: as there. SkyRL's KL
    term is a mean over sequences, whatever the policy loss is."""
    where: str = one_of("loss", "reward")
    """loss: a term beside the policy's, with a gradient of its own. reward: each token's reward is less by coefficient
    times the estimate at the weights that sampled (arXiv:1909.08593), and whatever is made of rewards sees it; k1 is
    what is usual. It needs the policy's log-probs, a pass of its own."""
    target: Optional[float] = at_least(1e-6, None)
    """Of where=reward: KL of an answer, the sum over its tokens, that the coefficient adapts to; None leaves it."""
    horizon: int = at_least(1, 10_000)
    """Of target: trajectories in which the coefficient may change by a fifth."""

    @property
    def in_loss(self) -> float:
        """The coefficient of the loss's term; 0 without one."""
        return self.coefficient if self.where == "loss" else 0.0


@dataclass
class GspoConfig:
    """The clip range of `loss: gspo` (arXiv:2507.18071, section 5.1), whose ratio is a mean over an answer's tokens."""

    clip_low: float = between(0, 1, 3e-4)
    """An answer's ratio is clipped below 1 - clip_low."""
    clip_high: float = at_least(0, 4e-4)
    """An answer's ratio is clipped above 1 + clip_high."""


@dataclass
class CispoConfig:
    """The clip range of `loss: cispo` (arXiv:2506.13585)."""

    clip_low: float = between(0, 1, 1.0)
    """A token's weight is clipped below 1 - clip_low; 1 does not clip, as published."""
    clip_high: float = at_least(0, 4.0)
    """A token's weight is clipped above 1 + clip_high. MiniMax-M1 does not say its value; ScaleRL (arXiv:2510.13786)
    has a weight of at most 4 to 5."""


@dataclass
class SapoConfig:
    """The gate of `loss: sapo` (arXiv:2511.20347)."""

    temperature_positive: float = at_least(0.001, 1.0)
    """Steepness of the gate where the advantage is positive."""
    temperature_negative: float = at_least(0.001, 1.05)
    """Steepness of the gate where it is negative."""


@dataclass
class GmpoConfig:
    """The clip range of `loss: gmpo` (arXiv:2507.20673), of a token's log-ratio."""

    clip_low: float = at_least(0, 0.4)
    """A log-ratio is clipped below -clip_low where the advantage is negative."""
    clip_high: float = at_least(0, 0.4)
    """A log-ratio is clipped above clip_high where the advantage is positive."""


@dataclass
class AlgorithmConfig:
    """From rewards to a loss."""

    advantage: str = "grpo"
    """How much better a trajectory or a token did. Compared with its group: grpo, rloo (leave-one-out), opo (a baseline
    weighed by length), pass_at_k (only the best one gains), maxrl (divided by the mean), gpg (grown where other groups
    say nothing), gdpo (each of an environment's rewards by itself), optimal_token_baseline (a baseline for each token,
    weighed by how much the trajectories up to it can move the policy). Compared with the step: reinforce++ (what is
    earned from each token on) and reinforce++_baseline (whitened over all tokens). By answer: grpo_turns. With what a
    critic expected: gae. With a greedy answer to the prompt, one more for each: remax. With nothing: reinforce. Or your
    own function of (AdvantageInputs, AlgorithmConfig) by import path (`package.module:function` or
    `path/to/file.py:function`)."""
    gae: GaeConfig = field(default_factory=GaeConfig)
    """Setting of gae, whose critic is `critic`."""
    normalize: bool = True
    """grpo and grpo_turns divide by the group's standard deviation."""
    gamma: float = between(0, 1, 1.0)
    """Discount of reinforce++ and gae, from one of the policy's tokens to the next: below 1 what comes later counts
    less, and an answer is worth less the longer it is."""
    whiten: str = one_of("none", "group", "batch", "batch_std")
    """What is done with any estimator's advantages. group, batch: mean 0 and deviation 1 over the tokens of each group,
    or of the step; batch takes the step's mean from groups without a signal too, and is what PPO with a critic does,
    whose returns are not whitened. batch_std: divided by the standard deviation of the step's rewards
    (arXiv:2508.08221)."""
    reward_weights: dict[str, float] = field(default_factory=dict)
    """Name → weight in the sum, for environments whose step gives several rewards as a dict; without any all count
    once. Where there are weights, each reward that an environment names must have one."""
    loss: str = "ppo"
    """What is minimised: ppo; gspo (one ratio for all tokens of an answer, or of a `sequence_unit`), gmpo (their
    geometric mean), cispo (every token has a gradient), sapo (a smooth gate instead of the clip), dppo_tv and dppo_kl
    (a bound on how far a token's distribution moves, instead of its ratio), dro (the distance is punished, nothing
    clipped), clip_cov and kl_cov (tokens that make the entropy fall are left out, or held where they were); or your own
    function of (LossInputs, AlgorithmConfig) by import path (`package.module:function` or
    `path/to/file.py:function`)."""
    old_logprobs: str = one_of("policy", "engine")
    """What ratios are taken to. policy: its own log-probs with the weights that sampled; a step of several mini-batches
    computes them first. engine: those that the engine drew with, so that clips and ratios hold the engine's mismatch
    too and no such pass is needed (verl's bypass_mode). DPPO is published so, and with `loss=cispo` it is the CISPO of
    other programs that they anchor at the rollout."""
    gspo: GspoConfig = field(default_factory=GspoConfig)
    """The clip range of gspo. Neither it nor the losses below look at `clip_low` and `clip_high`."""
    cispo: CispoConfig = field(default_factory=CispoConfig)
    """The clip range of cispo."""
    sapo: SapoConfig = field(default_factory=SapoConfig)
    """The gate of sapo."""
    gmpo: GmpoConfig = field(default_factory=GmpoConfig)
    """The clip range of gmpo."""
    clip_cov: ClipCovConfig = field(default_factory=ClipCovConfig)
    """The tokens of clip_cov; its clip range is `clip_low` and `clip_high`."""
    kl_cov: KlCovConfig = field(default_factory=KlCovConfig)
    """The tokens of kl_cov."""
    dppo: DppoConfig = field(default_factory=DppoConfig)
    """The trust region of dppo_tv and dppo_kl."""
    dro: DroConfig = field(default_factory=DroConfig)
    """The punishment of dro."""
    clip_low: float = between(0, 1, 0.2)
    """Ratio is clipped below 1 - clip_low."""
    clip_high: float = at_least(0, 0.2)
    """Ratio is clipped above 1 + clip_high."""
    dual_clip: Optional[float] = at_least(1, None)
    """Bound c of dual-clip PPO (arXiv:1912.09729) for negative advantages; None is off."""
    loss_mean: str = one_of("tokens", "sequences", "prompts", "constant", "micro_batches")
    """tokens: over all tokens of the mini-batch; sequences: per-sequence token mean, then over sequences; prompts: the
    token mean of each prompt's group, then over groups; constant: the sum of a sequence's tokens over
    `loss_mean_length`, then the mean over sequences, so that no token weighs less in a long answer (Dr. GRPO, with
    `normalize=false`);
    micro_batches: token mean over every `loss_mean_samples` samples, then over these groups. That is what programs
    compute that take the token mean of each micro-batch (SkyRL's `token_mean` of 2025, `token_mean_legacy` today). Here
    the groups are fixed: the loss does not depend on `policy.micro_tokens`."""
    sequence_unit: str = one_of("answer", "trajectory")
    """What one ratio of a whole sequence is of: that of gspo, gmpo, `importance_level=sequence`, `rejection`'s
    sequence, geometric, outliers and off_policy. answer: the tokens of one turn. trajectory: all of the policy's
    tokens, over all turns, as verl, SkyRL, TRL, slime and NeMo-RL have it. The samples of one trajectory
    (`rollout.step_wise`) then share a micro-batch, even where they exceed `policy.micro_tokens`."""
    loss_mean_samples: Optional[int] = at_least(1, None)
    """Of `loss_mean=micro_batches`, which needs it: samples of one group, the micro-batch of the run that is
    reproduced. Samples that follow one another in the mini-batch make a group; a trajectory is one sample, also with
    `rollout.step_wise`. A group without a token to learn from counts as one whose loss is 0."""
    loss_mean_length: Optional[int] = at_least(1, None)
    """Of `loss_mean=constant`, which needs it: what the sum of every sequence's tokens is divided by. Published runs
    take the longest response that is allowed."""
    importance_cap: Optional[float] = at_least(0, None)
    """Importance sampling of the engine's mismatch: the loss is multiplied by π_old / π_engine, capped here; None is
    off."""
    importance_floor: float = at_least(0, 0.0)
    """The lower bound of that weight."""
    importance_outside: str = one_of("truncate", "mask")
    """What a weight outside of `importance_floor` to `importance_cap` becomes. truncate: the bound (TIS); mask: 0
    (MIS)."""
    importance_level: str = one_of("token", "sequence")
    """Whose weight it is: each token's ratio, or the product over an answer (or `sequence_unit`), which all of its
    tokens get."""
    importance_normalize: bool = False
    """Divides the weights by their mean over the mini-batch, as the loss weighs its tokens, so that a mismatch changes
    no step's size."""
    rejection: RejectionConfig = field(default_factory=RejectionConfig)
    """Tokens or answers that are left out as the engine's log-probs are too far off."""
    kl: KlConfig = field(default_factory=KlConfig)
    """KL to the reference."""
    entropy: EntropyConfig = field(default_factory=EntropyConfig)
    """The entropy bonus."""
    dynamic_sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)
    """What becomes of groups without a signal."""
    overlong: OverlongConfig = field(default_factory=OverlongConfig)
    """Length limit handling."""
