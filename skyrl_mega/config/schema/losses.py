"""Settings of individual losses, except PPO's clip range."""

from __future__ import annotations

from dataclasses import dataclass

from skyrl_mega.config.schema.fields import at_least, between


@dataclass
class ClipCovConfig:
    """Tokens dropped by `loss: clip_cov` (arXiv:2505.22617), drawn at random over the mini-batch."""

    share: float = between(0, 1, 2e-4)
    """Share of all tokens to drop, rounded down, but at least 1 token."""
    low: float = at_least(0, 1.0)
    """Lower bound of the covariance of advantage and log-prob of a dropped token."""
    high: float = at_least(0, 5.0)
    """Upper bound of the covariance of advantage and log-prob of a dropped token."""


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
