"""Built-in losses: settings except PPO's clip range, the function of each, and the traits that settings and health
checks ask for.

A user's own loss (`algorithm.loss` as import path) has the traits of `OWN_LOSS`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from skyrl_mega.config.schema.fields import Refusals, at_least, between


@dataclass
class GspoConfig:
    """Clip range of `loss: gspo` (arXiv:2507.18071, section 5.1). Its ratio is the geometric mean over an answer's
    tokens."""

    clip_low: float = between(0, 1, 3e-4)
    """An answer's ratio is clipped below 1 - clip_low."""
    clip_high: float = at_least(0, 4e-4)
    """An answer's ratio is clipped above 1 + clip_high."""


@dataclass
class CispoConfig:
    """Clip range of `loss: cispo` (arXiv:2506.13585)."""

    clip_low: float = between(0, 1, 1.0)
    """A token's weight is clipped below 1 - clip_low; 1 does not clip, as published."""
    clip_high: float = at_least(0, 4.0)
    """A token's weight is clipped above 1 + clip_high. MiniMax-M1 does not publish its value; ScaleRL
    (arXiv:2510.13786) uses weights of at most 4 to 5."""


@dataclass
class SapoConfig:
    """Gate of `loss: sapo` (arXiv:2511.20347)."""

    temperature_positive: float = at_least(0.001, 1.0)
    """Steepness of the gate for positive advantages."""
    temperature_negative: float = at_least(0.001, 1.05)
    """Steepness of the gate for negative advantages."""


@dataclass
class GmpoConfig:
    """Clip range of `loss: gmpo` (arXiv:2507.20673), for a token's log-ratio."""

    clip_low: float = at_least(0, 0.4)
    """A log-ratio is clipped below -clip_low if the advantage is negative."""
    clip_high: float = at_least(0, 0.4)
    """A log-ratio is clipped above clip_high if the advantage is positive."""


@dataclass
class ClipCovConfig:
    """Tokens dropped by `loss: clip_cov` (arXiv:2505.22617), drawn at random over the mini-batch."""

    share: float = between(0, 1, 2e-4)
    """Share of all tokens to drop, rounded down, but at least 1 token."""
    low: float = at_least(0, 1.0)
    """Lower bound of the covariance of advantage and log-prob of a dropped token."""
    high: float = at_least(0, 5.0)
    """Upper bound of the covariance of advantage and log-prob of a dropped token."""

    def refusals(self) -> Refusals:
        """Yields a refusal if `low` is not below `high`."""
        if self.low >= self.high:
            yield "algorithm.clip_cov.low", f"allowed is a number below algorithm.clip_cov.high = {self.high:g}"


@dataclass
class KlCovConfig:
    """Tokens penalized by `loss: kl_cov` (arXiv:2505.22617), chosen over the mini-batch."""

    share: float = between(0, 1, 2e-4)
    """Share of all tokens to penalize, rounded down, but at least 1 token: the tokens with the highest covariance of
    advantage and log-prob. The paper uses 2e-3 for 7 billion parameters and 2e-4 for 32 billion."""
    coefficient: float = at_least(0, 1.0)
    """Factor of the penalty, the distance of the log-probs of these tokens from the old log-probs."""


@dataclass
class DppoConfig:
    """Trust region of `loss: dppo_tv` and `dppo_kl` (arXiv:2602.04879): bounds on the change of a token's
    distribution."""

    tv_low: float = at_least(0, 0.2)
    """dppo_tv: largest decrease of the probability of a token with negative advantage."""
    tv_high: float = at_least(0, 0.2)
    """dppo_tv: largest increase of the probability of a token with positive advantage."""
    kl_low: float = at_least(0, 0.05)
    """dppo_kl: largest binary KL, in nats, of a token with decreased probability and negative advantage."""
    kl_high: float = at_least(0, 0.05)
    """dppo_kl: largest binary KL, in nats, of a token with increased probability and positive advantage."""


@dataclass
class DroConfig:
    """Penalty of `loss: dro` on the distance from the old policy (arXiv:2405.19107)."""

    strength: float = at_least(0, 0.1)
    """Factor of half the squared log-ratio of a token. verl names this dro_beta."""


CLIP = ("clip_low", "clip_high")


@dataclass(frozen=True)
class LossTraits:
    """Traits of a policy loss."""

    function: str = ""
    """The function: `file:name` in `algorithms/losses/`."""
    reads: tuple[str, ...] = ()
    """Settings of `algorithm` read by this loss but not by every loss."""
    clips_ratio: bool = False
    """True if the first two settings in `reads` bound the ratio to 1 - low and 1 + high."""
    sequence_ratio: bool = False
    """True if all tokens of a sequence share a ratio."""
    learns_clipped: bool = False
    """True if a token counted in `clip_fraction` keeps a gradient."""
    learns_without_advantage: bool = False
    """True if tokens with advantage 0 may have a gradient, such as a pull towards the old policy."""
    covariance: Literal["", "drawn", "highest"] = ""
    """Tokens selected over the mini-batch by the covariance of advantage and log-prob (`algorithms.selection`)."""


OWN_LOSS = LossTraits(learns_without_advantage=True)
LOSSES = {
    "ppo": LossTraits("ppo:ppo", reads=(*CLIP, "dual_clip"), clips_ratio=True),
    "gspo": LossTraits(
        "gspo:gspo", reads=("gspo.clip_low", "gspo.clip_high", "dual_clip"), clips_ratio=True, sequence_ratio=True
    ),
    "cispo": LossTraits("cispo:cispo", reads=("cispo.clip_low", "cispo.clip_high"), learns_clipped=True),
    "sapo": LossTraits(
        "sapo:sapo", reads=("sapo.temperature_positive", "sapo.temperature_negative"), learns_clipped=True
    ),
    "gmpo": LossTraits("gmpo:gmpo", reads=("gmpo.clip_low", "gmpo.clip_high"), sequence_ratio=True),
    "dppo_tv": LossTraits("dppo:dppo_tv", reads=("dppo.tv_low", "dppo.tv_high")),
    "dppo_kl": LossTraits("dppo:dppo_kl", reads=("dppo.kl_low", "dppo.kl_high")),
    "dro": LossTraits("dro:dro", reads=("dro.strength",), learns_without_advantage=True),
    "clip_cov": LossTraits(
        "covariance:clip_cov",
        reads=(*CLIP, "dual_clip", "clip_cov.share", "clip_cov.low", "clip_cov.high"),
        clips_ratio=True,
        covariance="drawn",
    ),
    "kl_cov": LossTraits(
        "covariance:kl_cov",
        reads=("kl_cov.share", "kl_cov.coefficient"),
        learns_without_advantage=True,
        covariance="highest",
    ),
}
"""Values of `algorithm.loss`."""
