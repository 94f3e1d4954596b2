"""Checks of the loss's settings."""

from __future__ import annotations

from typing import Any

from skyrl_mega.config.derived import response_limit
from skyrl_mega.config.errors import UserError
from skyrl_mega.config.schema import AlgorithmConfig, Config, EntropyConfig
from skyrl_mega.config.schema.losses import LOSSES
from skyrl_mega.config.values import shown


def check_loss(c: Config) -> None:
    """Rejects settings of the loss that are incomplete, ignored or harmful to training.

    Raises:
        UserError: A setting is rejected; names key, value, reason and fix.
    """
    a, dual_clip = c.algorithm, [name for name, traits in LOSSES.items() if "dual_clip" in traits.reads]
    _check_correction(a)
    _check_entropy(a.entropy)
    _check_covariance(c)
    if a.loss_mean == "micro_batches" and a.loss_mean_samples is None:
        raise UserError(
            "it needs algorithm.loss_mean_samples, the samples of one micro-batch of the run "
            "that is reproduced; give it, or algorithm.loss_mean=tokens",
            key="algorithm.loss_mean",
            value="micro_batches",
        )
    if a.loss_mean == "constant" and a.loss_mean_length is None:
        raise UserError(
            "it needs algorithm.loss_mean_length, what the sum of a sequence's tokens is divided "
            f"by; give it, such as the {response_limit(c.rollout)} tokens of the longest response",
            key="algorithm.loss_mean",
            value="constant",
        )
    if a.dual_clip is not None and a.loss in LOSSES and a.loss not in dual_clip:
        raise UserError(
            f"algorithm.loss={a.loss} has no such bound",
            key="algorithm.dual_clip",
            value=f"{a.dual_clip:g}",
            fix=f"give algorithm.dual_clip=null, or algorithm.loss={', '.join(dual_clip[:-1])} or {dual_clip[-1]}",
        )
    if a.kl.unbiased and not a.kl.coefficient:
        raise UserError(
            "there is no KL term to correct; give algorithm.kl.coefficient above 0, or algorithm.kl.unbiased=false",
            key="algorithm.kl.unbiased",
            value="true",
        )
    if a.kl.unbiased and a.kl.estimator not in ("k1", "k3"):
        raise UserError(
            f"times π / π_old, algorithm.kl.estimator={a.kl.estimator} has not the gradient of KL; allowed is k1 or k3",
            key="algorithm.kl.unbiased",
            value="true",
        )
    if a.dual_clip == 1:
        raise UserError(
            "it would halve the gradient of every negative advantage where the policy has not "
            "moved yet; allowed is a number above 1 (arXiv:1912.09729 has 3), or null, which is "
            "off",
            key="algorithm.dual_clip",
            value="1",
        )


def _check_covariance(c: Config) -> None:
    """Rejects an empty covariance range, and penalized tokens that cannot have moved."""
    cov, kl_cov = c.algorithm.clip_cov, c.algorithm.kl_cov
    if cov.low >= cov.high:
        raise UserError(
            f"allowed is a number below algorithm.clip_cov.high = {cov.high:g}",
            key="algorithm.clip_cov.low",
            value=f"{cov.low:g}",
        )
    if c.algorithm.loss != "kl_cov":
        return
    if kl_cov.coefficient == 0:
        raise UserError(
            "kl_cov would punish nothing; allowed is a number above 0", key="algorithm.kl_cov.coefficient", value="0"
        )
    alone = c.data.mini_batch_prompts in (None, c.data.prompts_per_step) and c.data.epochs_per_step == 1
    if alone and c.algorithm.old_logprobs == "policy":
        raise UserError(
            "the only optimizer step of an RL step would punish nothing, as no token has moved "
            "yet; give data.mini_batch_prompts, data.epochs_per_step of at least 2, or "
            "algorithm.loss=clip_cov",
            key="algorithm.loss",
            value="kl_cov",
        )


def _check_entropy(e: EntropyConfig) -> None:
    """Rejects an adaptive entropy bonus that cannot adapt."""
    key = "algorithm.entropy"
    if e.top_share == 0:
        raise UserError(
            "no token would be learned from; allowed is more, to 1, which takes all", key=f"{key}.top_share", value="0"
        )
    if e.target is None:
        return
    if e.step == 0:
        raise UserError(
            f"the coefficient would not adapt; allowed is more, or {key}.target=null", key=f"{key}.step", value="0"
        )
    if e.least >= e.most:
        raise UserError(
            f"allowed is a number below {key}.most = {e.most:g}; between them the coefficient adapts",
            key=f"{key}.least",
            value=f"{e.least:g}",
        )
    if not e.least <= e.coefficient <= e.most:
        raise UserError(
            f"with {key}.target allowed is a number from {key}.least = {e.least:g} to {key}.most = {e.most:g}",
            key=f"{key}.coefficient",
            value=f"{e.coefficient:g}",
        )


def _check_correction(a: AlgorithmConfig) -> None:
    """Rejects incomplete or ineffective settings of the correction for the engine's mismatch."""
    if a.importance_cap == 0:
        raise UserError(
            "every token's weight would be 0 and nothing would be learned; allowed is a number "
            "above 0 (the published is 2), or null, which does not correct",
            key="algorithm.importance_cap",
            value="0",
        )
    if a.importance_cap is None:
        parts: dict[str, tuple[Any, Any]] = {
            "importance_level": (a.importance_level, "token"),
            "importance_outside": (a.importance_outside, "truncate"),
            "importance_floor": (a.importance_floor, 0.0),
            "importance_normalize": (a.importance_normalize, False),
        }
        for key, (value, default) in parts.items():
            if value != default:
                raise UserError(
                    "there is no importance sampling; give algorithm.importance_cap, or "
                    f"algorithm.{key}={shown(default)}",
                    key=f"algorithm.{key}",
                    value=shown(value),
                )
    elif a.importance_floor >= a.importance_cap:
        raise UserError(
            f"allowed is a number below algorithm.importance_cap = {a.importance_cap:g}",
            key="algorithm.importance_floor",
            value=f"{a.importance_floor:g}",
        )
    if a.old_logprobs == "engine":
        ratios: dict[str, tuple[Any, Any]] = {
            "importance_cap": (a.importance_cap, None),
            "rejection.level": (a.rejection.level, "off"),
            "rejection.outlier_low": (a.rejection.outlier_low, None),
            "rejection.outlier_high": (a.rejection.outlier_high, None),
        }
        for key, (value, default) in ratios.items():
            if value != default:
                raise UserError(
                    "its ratio is 1 with algorithm.old_logprobs=engine, whose ratios have the mismatch already",
                    key=f"algorithm.{key}",
                    value=value,
                    fix=f"give algorithm.{key}={default or 'null'}, or algorithm.old_logprobs=policy",
                )
