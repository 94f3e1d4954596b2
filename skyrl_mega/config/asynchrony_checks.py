"""Checks of `asynchrony`."""

from __future__ import annotations

from skyrl_mega.config.errors import UserError
from skyrl_mega.config.schema import AlgorithmConfig, Config

CORRECTION = "algorithm.importance_cap=2"
"""Usual correction for training on tokens of older weights."""
DEFAULT_STALENESS = 1
"""Default of `asynchrony.max_staleness`."""
MOST_SIMULATED = 16
"""Largest staleness simulated by `--simulate`, above the best values of all modes; the cost of a simulation grows with
each step."""


def check_asynchrony(c: Config) -> None:
    """Checks that generation and training can overlap with these settings.

    Raises:
        UserError: A setting forbids the overlap, or training would be wrong.
    """
    mode, max_staleness = c.asynchrony.mode, c.asynchrony.max_staleness
    if mode == "off":
        if max_staleness not in (0, DEFAULT_STALENESS):
            raise UserError(
                "asynchrony.mode=off trains on nothing that is older than its weights",
                key="asynchrony.max_staleness",
                value=max_staleness,
                fix="give asynchrony.mode=full, or leave asynchrony.max_staleness out",
            )
        return
    if mode == "one_step" and max_staleness > 1:
        raise UserError(
            "asynchrony.mode=one_step is one step ahead, allowed is 0 or 1",
            key="asynchrony.max_staleness",
            value=max_staleness,
            fix="give asynchrony.max_staleness=1, or asynchrony.mode=full for more",
        )
    off = "asynchrony.mode=off" + (
        "" if max_staleness in (0, DEFAULT_STALENESS) else " and leave out asynchrony.max_staleness"
    )
    needs = f", and {CORRECTION} for what is stale" if max_staleness and not has_correction(c.algorithm) else ""
    if c.cluster.shared:
        raise UserError(
            "engines and policy compute at the same time, and cluster.shared gives them the same "
            f"GPUs; they take turns with {off}, and have GPUs of their own with "
            f"cluster.shared=false, residency.keep=null{needs} (--simulate compares both)",
            key="asynchrony.mode",
            value=mode,
        )
    if c.residency.keep is not None:
        raise UserError(
            "engines and policy compute at the same time, so nothing can take turns",
            key="asynchrony.mode",
            value=mode,
            fix=f"give residency.keep=null{needs}, or {off}",
        )
    if max_staleness and not has_correction(c.algorithm):
        raise UserError(
            "tokens of older weights would be trained on as the policy's own; give a correction, "
            "such as algorithm.importance_cap=2, algorithm.old_logprobs=engine or "
            "algorithm.rejection.level=token, or asynchrony.max_staleness=0",
            key="asynchrony.max_staleness",
            value=max_staleness,
        )
    if mode == "full":
        _check_full(c)


def has_correction(a: AlgorithmConfig) -> bool:
    """Returns True if the loss of every token accounts for the sampling weights, i.e. uses the engine's log-probs."""
    user_loss = ":" in a.loss
    return user_loss or a.rejection.level != "off" or a.importance_cap is not None or a.old_logprobs == "engine"


def _check_full(c: Config) -> None:
    """Rejects settings not supported by `mode=full`."""
    dynamic = c.algorithm.dynamic_sampling
    unsupported = {
        "run.deterministic = true": (c.run.deterministic, "the clock decides which groups a step has"),
        f"algorithm.dynamic_sampling.mode = {dynamic.mode}": (
            dynamic.enabled and dynamic.mode != "filter",
            "groups without a signal are left out as they come, and others follow",
        ),
        f"algorithm.dynamic_sampling.oversample = {dynamic.oversample:g}": (
            dynamic.enabled and dynamic.oversample != 1,
            "groups are generated ahead anyway",
        ),
        f"algorithm.advantage = {c.algorithm.advantage}": (
            c.algorithm.advantage_traits.greedy,
            "a greedy answer would be of other weights than the samples that are compared with it",
        ),
    }
    for setting, (is_set, why) in unsupported.items():
        if is_set:
            raise UserError(
                f"with asynchrony.mode=full {why}",
                key=setting,
                fix="leave it out, or give asynchrony.mode=one_step with asynchrony.max_staleness="
                f"{min(c.asynchrony.max_staleness, 1)}",
            )
