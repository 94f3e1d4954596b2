"""Settings of advantages, losses and corrections."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite
from typing import Optional

from skyrl_mega.config.schema.corrections import RejectionConfig
from skyrl_mega.config.schema.critic import GaeConfig
from skyrl_mega.config.schema.entropy import EntropyConfig
from skyrl_mega.config.schema.estimators import ESTIMATORS, OWN, EstimatorTraits
from skyrl_mega.config.schema.fields import Refusals, at_least, between, one_of
from skyrl_mega.config.schema.losses import (
    LOSSES,
    OWN_LOSS,
    CispoConfig,
    ClipCovConfig,
    DppoConfig,
    DroConfig,
    GmpoConfig,
    GspoConfig,
    KlCovConfig,
    LossTraits,
    SapoConfig,
)
from skyrl_mega.config.schema.samples import DynamicSamplingConfig, OverlongConfig


@dataclass
class KlConfig:
    """KL penalty to the reference policy, in the loss or in the reward."""

    coefficient: float = at_least(0, 0.0)
    """Factor of the KL estimate; 0 runs without a reference."""
    estimator: str = one_of("k3", "k1", "k2", "abs", "k3+")
    """Estimator of KL(policy ‖ reference) from sampled tokens. k1, k2, k3: Schulman's estimators
    (joschu.net/blog/kl-approx.html). abs: absolute difference of the log-probs. k3+: value of k3 with the gradient of
    k2; its expectation is the gradient of KL(policy ‖ reference)."""
    unbiased: bool = False
    """Multiplies the estimate by π / π_old (arXiv:2512.02556). Without this factor the estimate is biased as soon as
    the policy differs from the weights at sampling time."""
    mean: str = one_of("loss", "tokens", "sequences")
    """Averaging of the KL term. loss: the same as `algorithm.loss_mean`. tokens, sequences: as defined there. SkyRL
    always averages the KL term over sequences."""
    where: str = one_of("loss", "reward")
    """Place of the KL penalty. loss: a separate loss term with its own gradient. reward: subtracts coefficient ×
    estimate from each token's reward, computed with the weights at sampling time (arXiv:1909.08593), before advantages
    are computed; k1 is usual. `reward` needs an additional forward pass for the policy's log-probs."""
    target: Optional[float] = at_least(1e-6, None)
    """Target for the adaptive coefficient of `where=reward`: KL of an answer, summed over tokens; null keeps the
    coefficient fixed."""
    horizon: int = at_least(1, 10_000)
    """Number of trajectories over which the adaptive coefficient may change by 20 %; used with `target`."""

    @property
    def in_loss(self) -> float:
        """Coefficient of the KL term in the loss; 0 without such a term."""
        return self.coefficient if self.where == "loss" else 0.0

    def refusals(self) -> Refusals:
        """Yields refusals of KL settings without effect or with a wrong gradient: `target` in the loss; no coefficient,
        `unbiased` or another `mean` in the reward; `unbiased` without a coefficient, or with an estimator other than k1
        and k3."""
        if self.where == "loss" and self.target is not None:
            fix = "give algorithm.kl.where=reward, or algorithm.kl.target=null"
            yield "algorithm.kl.target", "the coefficient of a KL term in the loss is fixed", fix
        if self.where == "reward" and not self.coefficient:
            yield (
                "algorithm.kl.where",
                "algorithm.kl.coefficient = 0 subtracts nothing from the reward; give a number above 0, or "
                "algorithm.kl.where=loss",
            )
        for name, default, given in (("unbiased", "false", self.unbiased), ("mean", "loss", self.mean != "loss")):
            if self.where == "reward" and given:
                why = "it belongs to a KL term in the loss, and algorithm.kl.where=reward has none"
                yield f"algorithm.kl.{name}", why, f"give algorithm.kl.{name}={default}, or algorithm.kl.where=loss"
        if self.unbiased and not self.coefficient:
            yield (
                "algorithm.kl.unbiased",
                "there is no KL term to correct; give algorithm.kl.coefficient above 0, or algorithm.kl.unbiased=false",
            )
        if self.unbiased and self.estimator not in ("k1", "k3"):
            yield (
                "algorithm.kl.unbiased",
                f"algorithm.kl.estimator={self.estimator} times π / π_old does not have the gradient of KL; allowed is "
                "k1 or k3",
            )


@dataclass
class AlgorithmConfig:
    """Advantages, loss, importance sampling, KL, entropy and sample selection."""

    advantage: str = "grpo"
    """Advantage estimator. Baselines from the prompt's group: grpo, rloo (leave-one-out), opo (length-weighted
    baseline), pass_at_k (only the best sample gains), maxrl (divides by the mean), gpg (scales up when other groups
    have equal rewards), gdpo (normalizes each of several rewards separately), optimal_token_baseline (a baseline per
    token, weighted by how far the trajectories up to this token can move the policy). Baselines from the whole step:
    reinforce++ (reward from each token onwards, whitened) and reinforce++_baseline (group baseline, whitened over all
    tokens). Per answer of a multi-turn trajectory: grpo_turns. With a critic: gae. With a greedy answer per prompt,
    sampled in addition: remax. Without a baseline: reinforce. Your own function of (AdvantageInputs, AlgorithmConfig):
    an import path (`package.module:function` or `path/to/file.py:function`)."""
    gae: GaeConfig = field(default_factory=GaeConfig)
    """Settings of gae; the critic is configured by `critic`."""
    normalize: bool = True
    """Divides by the group's standard deviation, in grpo and grpo_turns."""
    gamma: float = between(0, 1, 1.0)
    """Discount of reinforce++ and gae, per token of the policy: below 1, later rewards count less and a longer answer
    is worth less."""
    whiten: str = one_of("none", "group", "batch", "batch_std")
    """Normalization of the advantages of any estimator. group, batch: mean 0 and standard deviation 1 over the tokens
    of each group, or of the step. batch also subtracts the step's mean from groups without a signal; PPO with a critic
    uses batch, and does not whiten returns. batch_std: divides by the standard deviation of the step's rewards
    (arXiv:2508.08221)."""
    reward_weights: dict[str, float] = field(default_factory=dict)
    """Reward name → weight in the sum, for environments with several rewards per step (a dict); if empty, each weight
    is 1. If any weight is given, every reward named by an environment must be listed."""
    loss: str = "ppo"
    """Policy loss: ppo; gspo (a single ratio for all tokens of an answer, or of a `sequence_unit`); gmpo (geometric
    mean of an answer's clipped ratios); cispo (every token keeps a gradient); sapo (a smooth gate instead of the clip);
    dppo_tv and dppo_kl (bound the change of a token's distribution instead of the ratio); dro (penalizes the distance
    to the old policy, without a clip); clip_cov and kl_cov (drop or penalize the tokens with the strongest decrease of
    entropy). Your own function of (LossInputs, AlgorithmConfig): an import path (`package.module:function` or
    `path/to/file.py:function`)."""
    old_logprobs: str = one_of("policy", "engine")
    """Log-probs in the denominator of the ratios. policy: recomputed by the policy with the weights at sampling time; a
    step of several mini-batches runs a separate forward pass first. engine: reported by the engine while sampling. The
    ratios and clips of `engine` include the engine's mismatch, and no such pass is needed (verl's bypass_mode). DPPO is
    published with `engine`; `loss=cispo` with `engine` is the CISPO of other programs."""
    gspo: GspoConfig = field(default_factory=GspoConfig)
    """Clip range of gspo. gspo and the losses below ignore `clip_low` and `clip_high`."""
    cispo: CispoConfig = field(default_factory=CispoConfig)
    """Clip range of cispo."""
    sapo: SapoConfig = field(default_factory=SapoConfig)
    """Gate of sapo."""
    gmpo: GmpoConfig = field(default_factory=GmpoConfig)
    """Clip range of gmpo."""
    clip_cov: ClipCovConfig = field(default_factory=ClipCovConfig)
    """Token selection of clip_cov; the clip range is `clip_low` and `clip_high`."""
    kl_cov: KlCovConfig = field(default_factory=KlCovConfig)
    """Token selection of kl_cov."""
    dppo: DppoConfig = field(default_factory=DppoConfig)
    """Trust region of dppo_tv and dppo_kl."""
    dro: DroConfig = field(default_factory=DroConfig)
    """Penalty of dro."""
    clip_low: float = between(0, 1, 0.2)
    """The ratio is clipped below 1 - clip_low."""
    clip_high: float = at_least(0, 0.2)
    """The ratio is clipped above 1 + clip_high."""
    dual_clip: Optional[float] = at_least(1, None)
    """Bound c of dual-clip PPO (arXiv:1912.09729) for negative advantages; null is off."""
    loss_mean: str = one_of("tokens", "sequences", "prompts", "constant", "micro_batches")
    """Averaging of the token losses. tokens: over all tokens of the mini-batch. sequences: over the tokens of each
    sequence, then over sequences. prompts: over the tokens of each prompt's group, then over groups. constant: sum over
    a sequence's tokens divided by `loss_mean_length`, then mean over sequences; a token counts as much in a long answer
    as in a short answer (Dr. GRPO, with `normalize=false`). micro_batches: over the tokens of every `loss_mean_samples`
    samples, then over these groups; this reproduces programs with a token mean per micro-batch (SkyRL's `token_mean` of
    2025, `token_mean_legacy` today). The groups are fixed, so the loss does not depend on `policy.micro_tokens`."""
    sequence_unit: str = one_of("answer", "trajectory")
    """Unit of a sequence-level ratio: in gspo, gmpo, `importance_level=sequence`, and in `rejection` for sequence,
    geometric, the outlier bounds and off_policy. answer: the tokens of a turn. trajectory: all tokens of the policy
    over all turns, as in verl, SkyRL, TRL, slime and NeMo-RL; the samples of a trajectory (`rollout.step_wise`) then
    share a micro-batch, even above `policy.micro_tokens`."""
    loss_mean_samples: Optional[int] = at_least(1, None)
    """Samples per group of `loss_mean=micro_batches`, required there: the micro-batch size of the run to be reproduced.
    A group consists of consecutive samples of the mini-batch; a trajectory counts as a single sample, also with
    `rollout.step_wise`. A group without a trainable token counts with loss 0."""
    loss_mean_length: Optional[int] = at_least(1, None)
    """Divisor of each sequence's sum in `loss_mean=constant`, required there. Published runs use the maximum response
    length."""
    importance_cap: Optional[float] = at_least(0, None)
    """Upper bound of the importance weight π_old / π_engine. The weight multiplies the loss to correct the engine's
    mismatch; null applies no weight."""
    importance_floor: float = at_least(0, 0.0)
    """Lower bound of the importance weight."""
    importance_outside: str = one_of("truncate", "mask")
    """Treatment of a weight outside `importance_floor` to `importance_cap`. truncate: set to the bound (TIS). mask: set
    to 0 (MIS)."""
    importance_level: str = one_of("token", "sequence")
    """Level of the importance weight. token: each token's own ratio. sequence: the product over an answer (or
    `sequence_unit`), applied to all tokens of the answer."""
    importance_normalize: bool = False
    """Divides the weights by the mean weight of the mini-batch (averaged like the loss), so that a mismatch does not
    change the size of a step."""
    rejection: RejectionConfig = field(default_factory=RejectionConfig)
    """Rejection of tokens or answers with engine log-probs too far off."""
    kl: KlConfig = field(default_factory=KlConfig)
    """KL to the reference."""
    entropy: EntropyConfig = field(default_factory=EntropyConfig)
    """Entropy bonus and selection of high-entropy tokens."""
    dynamic_sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)
    """Replacement of groups without a signal."""
    overlong: OverlongConfig = field(default_factory=OverlongConfig)
    """Treatment of responses near or past the length limit."""

    @property
    def advantage_traits(self) -> EstimatorTraits:
        """Traits of the advantage estimator named by `advantage`; `OWN` for a user's own estimator."""
        return ESTIMATORS.get(self.advantage, OWN)

    @property
    def loss_traits(self) -> LossTraits:
        """Traits of the policy loss named by `loss`; `OWN_LOSS` for a user's own loss."""
        return LOSSES.get(self.loss, OWN_LOSS)

    def refusals(self) -> Refusals:
        """Yields refusals of settings in this group that are incomplete, without effect or harmful to training.

        Covers a reward weight that is no finite number; a discount, whitening, overlong penalty or KL in the
        reward that the estimator excludes; incomplete settings of the subgroups; an `importance_cap` of 0 or not above
        the floor, importance settings without a cap, and a cap or rejection beside `old_logprobs=engine`; `kl_cov` with
        coefficient 0; `loss_mean=micro_batches` without samples; a `dual_clip` of 1, or with a loss that does not
        read it.
        """
        for name, weight in self.reward_weights.items():
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not isfinite(weight):
                yield f"algorithm.reward_weights.{name}", "allowed is a finite number", "", f"{weight!r}"
        yield from self._advantage_refusals()
        yield from self.kl.refusals()
        yield from self.dynamic_sampling.refusals()
        yield from self.overlong.refusals()
        yield from self._importance_refusals()
        yield from self.entropy.refusals()
        yield from self.clip_cov.refusals()
        if self.loss == "kl_cov" and self.kl_cov.coefficient == 0:
            yield "algorithm.kl_cov.coefficient", "kl_cov would punish nothing; allowed is a number above 0"
        if self.loss_mean == "micro_batches" and self.loss_mean_samples is None:
            yield (
                "algorithm.loss_mean",
                "it needs algorithm.loss_mean_samples, the samples of one micro-batch of the run that is reproduced; "
                "give it, or algorithm.loss_mean=tokens",
            )
        dual_clip = [name for name, traits in LOSSES.items() if "dual_clip" in traits.reads]
        if self.dual_clip is not None and self.loss in LOSSES and self.loss not in dual_clip:
            losses = f"{', '.join(dual_clip[:-1])} or {dual_clip[-1]}"
            fix = f"give algorithm.dual_clip=null, or algorithm.loss={losses}"
            yield "algorithm.dual_clip", f"algorithm.loss={self.loss} has no such bound", fix
        if self.dual_clip == 1:
            yield (
                "algorithm.dual_clip",
                "it would halve the gradient of every negative advantage where the policy has not moved yet; allowed "
                "is a number above 1 (arXiv:1912.09729 has 3), or null, which is off",
            )

    def _advantage_refusals(self) -> Refusals:
        """Yields settings that the estimator does not allow."""
        name, traits = f"algorithm.advantage={self.advantage}", self.advantage_traits
        if self.gamma < 1 and not traits.discounts:
            discounting = " or ".join(name for name, each in ESTIMATORS.items() if each.discounts)
            fix = f"give algorithm.gamma=1, or algorithm.advantage={discounting}"
            yield "algorithm.gamma", f"{name} does not discount, so it has no effect", fix
        if self.whiten == "batch_std" and self.normalize and traits.normalizes:
            fix = "give algorithm.normalize=false, or algorithm.whiten=none"
            yield "algorithm.whiten", f"{name} already divides by the group's standard deviation", fix
        if self.whiten == "batch_std" and traits.critic:
            yield (
                "algorithm.whiten",
                "the standard deviation of the step's rewards is no scale for advantages from a critic, and is 0 if "
                "all rewards are equal",
                "give algorithm.whiten=batch, or none",
            )
        if traits.against_overlong and self.overlong.buffer and self.overlong.penalty:
            yield "algorithm.overlong.buffer", traits.against_overlong
        if self.kl.where == "reward" and traits.against_kl:
            fix = "give algorithm.kl.where=loss, or another estimator, such as reinforce++"
            yield "algorithm.kl.where", f"{name} {traits.against_kl}", fix
        if self.kl.where == "reward" and self.old_logprobs == "engine":
            yield (
                "algorithm.kl.where",
                "it is measured at the policy's own log-probs, which algorithm.old_logprobs=engine does not compute",
                "give algorithm.old_logprobs=policy",
            )

    def _importance_refusals(self) -> Refusals:
        """Yields incomplete or ineffective settings of the correction for the engine's mismatch."""
        if self.importance_cap == 0:
            yield (
                "algorithm.importance_cap",
                "every token's weight would be 0 and nothing would be learned; allowed is a number above 0 (the "
                "published is 2), or null, which does not correct",
            )
        if self.importance_cap is None:
            for name, default in (("level", "token"), ("outside", "truncate"), ("floor", 0.0), ("normalize", False)):
                if getattr(self, f"importance_{name}") != default:
                    key, default = f"algorithm.importance_{name}", "false" if default is False else default
                    yield key, f"there is no importance sampling; give algorithm.importance_cap, or {key}={default}"
        elif self.importance_floor >= self.importance_cap:
            why = f"allowed is a number below algorithm.importance_cap = {self.importance_cap:g}"
            yield "algorithm.importance_floor", why
        if self.old_logprobs == "engine":
            for name, given, unset in (
                ("importance_cap", self.importance_cap, None),
                ("rejection.level", self.rejection.level, "off"),
                ("rejection.outlier_low", self.rejection.outlier_low, None),
                ("rejection.outlier_high", self.rejection.outlier_high, None),
            ):
                if given != unset:
                    why = "its ratio is 1 with algorithm.old_logprobs=engine, whose ratios have the mismatch already"
                    fix = f"give algorithm.{name}={unset or 'null'}, or algorithm.old_logprobs=policy"
                    yield f"algorithm.{name}", why, fix, str(given)
