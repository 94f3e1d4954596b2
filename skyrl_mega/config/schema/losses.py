"""What losses have of their own, beside PPO's clip range."""

from __future__ import annotations

from dataclasses import dataclass

from skyrl_mega.config.schema.fields import at_least, between


@dataclass
class ClipCovConfig:
    """The tokens that `loss: clip_cov` leaves out (arXiv:2505.22617), drawn over the mini-batch."""

    share: float = between(0, 1, 2e-4)
    """So many of all tokens are left out, rounded down, at least one."""
    low: float = at_least(0, 1.0)
    """Only a token with at least this covariance of advantage and log-prob can be."""
    high: float = at_least(0, 5.0)
    """And with at most this one."""


@dataclass
class KlCovConfig:
    """The tokens that `loss: kl_cov` punishes (arXiv:2505.22617), chosen over the mini-batch."""

    share: float = between(0, 1, 2e-4)
    """So many of all tokens, rounded down, at least one: those with the highest covariance of advantage and log-prob.
    The paper has 2e-3 for 7 billion parameters and 2e-4 for 32."""
    coefficient: float = at_least(0, 1.0)
    """Multiplies the distance of their log-probs from the old ones."""


@dataclass
class DppoConfig:
    """The trust region of `loss: dppo_tv` and `dppo_kl` (arXiv:2602.04879): how far a token's distribution may have
    moved."""

    tv_low: float = at_least(0, 0.2)
    """dppo_tv: by how much the probability of a token may have fallen where the advantage is negative."""
    tv_high: float = at_least(0, 0.2)
    """dppo_tv: by how much it may have risen where the advantage is positive."""
    kl_low: float = at_least(0, 0.05)
    """dppo_kl: the largest binary KL, in nats, of a token that has become rarer where the advantage is negative."""
    kl_high: float = at_least(0, 0.05)
    """dppo_kl: the largest one of a token that has become more frequent where the advantage is positive."""


@dataclass
class DroConfig:
    """What `loss: dro` punishes the distance from the old policy with (arXiv:2405.19107)."""

    strength: float = at_least(0, 0.1)
    """Multiplies half the square of a token's log-ratio. verl has it as dro_beta."""
