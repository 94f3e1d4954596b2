"""Checks of the settings of rewards and advantages."""

from __future__ import annotations

from math import isfinite

from skyrl_mega.config.errors import UserError
from skyrl_mega.config.schema import Config
from skyrl_mega.config.schema.estimators import ESTIMATORS


def check_advantage(c: Config) -> None:
    """Rejects settings of rewards and advantages that would be ignored or would break training. A user's own estimator
    may use any of them.

    Raises:
        UserError: A setting is rejected; names key, value, reason and fix.
    """
    a, traits = c.algorithm, c.algorithm.advantage_traits
    for name, weight in a.reward_weights.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not isfinite(weight):
            raise UserError("allowed is a finite number", key=f"algorithm.reward_weights.{name}", value=f"{weight!r}")
    if a.gamma < 1 and not traits.discounts:
        raise UserError(
            f"algorithm.advantage={a.advantage} does not discount with it",
            key="algorithm.gamma",
            value=f"{a.gamma:g}",
            fix="give algorithm.gamma=1, or algorithm.advantage="
            + " or ".join(name for name, each in ESTIMATORS.items() if each.discounts),
        )
    if a.whiten == "group" and c.data.samples_per_prompt < 2:
        raise UserError(
            "algorithm.whiten=group would bring the only sample of each prompt to 0; give at "
            "least 2, or algorithm.whiten=batch",
            key="data.samples_per_prompt",
            value=c.data.samples_per_prompt,
        )
    if a.whiten == "batch_std" and a.normalize and traits.normalizes:
        raise UserError(
            f"algorithm.advantage={a.advantage} has divided by the group's standard deviation",
            key="algorithm.whiten",
            value="batch_std",
            fix="give algorithm.normalize=false, or algorithm.whiten=none",
        )
    if a.whiten == "batch_std" and traits.critic:
        raise UserError(
            "the deviation of the step's rewards is no scale of what a critic did not expect, "
            "and is 0 where all earn the same",
            key="algorithm.whiten",
            value="batch_std",
            fix="give algorithm.whiten=batch, or none",
        )
    if traits.against_overlong and a.overlong.buffer and a.overlong.penalty:
        raise UserError(traits.against_overlong, key="algorithm.overlong.buffer", value=a.overlong.buffer)
    if traits.greedy and c.rollout.sampling.temperature == 0:
        raise UserError(
            f"algorithm.advantage={a.advantage} would compare greedy answers with themselves; give a number above 0",
            key="rollout.sampling.temperature",
            value="0",
        )
    _check_kl(c)


def _check_kl(c: Config) -> None:
    """Checks the settings of KL in the reward."""
    a, kl = c.algorithm, c.algorithm.kl
    if kl.where == "loss":
        if kl.target is not None:
            raise UserError(
                "the coefficient of the loss's term is fixed",
                key="algorithm.kl.target",
                value=f"{kl.target:g}",
                fix="give algorithm.kl.where=reward, or algorithm.kl.target=null",
            )
        return
    if not kl.coefficient:
        raise UserError(
            "algorithm.kl.coefficient = 0 takes nothing from it; give a number above 0, or algorithm.kl.where=loss",
            key="algorithm.kl.where",
            value="reward",
        )
    if kl.unbiased or kl.mean != "loss":
        key, value, fix = ("unbiased", "true", "false") if kl.unbiased else ("mean", kl.mean, "loss")
        raise UserError(
            "it is of the loss's term, and algorithm.kl.where=reward has none",
            key=f"algorithm.kl.{key}",
            value=value,
            fix=f"give algorithm.kl.{key}={fix}, or algorithm.kl.where=loss",
        )
    if why := a.advantage_traits.against_kl:
        raise UserError(
            f"algorithm.advantage={a.advantage} {why}",
            key="algorithm.kl.where",
            value="reward",
            fix="give algorithm.kl.where=loss, or another estimator, such as reinforce++",
        )
    if a.old_logprobs == "engine":
        raise UserError(
            "it is measured at the policy's own log-probs, which algorithm.old_logprobs=engine does not compute",
            key="algorithm.kl.where",
            value="reward",
            fix="give algorithm.old_logprobs=policy",
        )
