"""Checks for settings without effect in combination with the other settings.

Such a setting is an error if changed from the default. Some settings usually come from a recipe's file, and a single
word on the command line (another loss, another mean, no KL) makes them ineffective; for these a note is printed
instead, because otherwise the recipe would have to be edited first. A user's own loss or estimator may read any
setting, so nothing is checked in that case.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from functools import reduce

from skyrl_mega.common.errors import UserError
from skyrl_mega.common.values import shown
from skyrl_mega.config.keys import keys
from skyrl_mega.config.megatron_options import unplanned_memory_notes
from skyrl_mega.config.schema import AlgorithmConfig, Config, EvaluationConfig
from skyrl_mega.config.schema.estimators import ESTIMATORS
from skyrl_mega.config.schema.losses import LOSSES


def check_unused(c: Config) -> None:
    """Raises a UserError for the first non-default setting of `algorithm` without effect under the other settings.

    Settings that usually come from a recipe are reported by `unused_notes` instead. With a user's own loss or estimator
    nothing is checked.
    """
    if not _has_user_function(c.algorithm) and (error := next(_non_default(c, _rejected(c.algorithm)), None)):
        raise error


def unused_notes(c: Config) -> list[str]:
    """Returns notes for the user about settings without effect, and about options missing in the memory plan.

    Settings without effect here are settings of a loss or an estimator not in use, which often come from a recipe, and
    evaluation settings without evaluation data. With a user's own loss or estimator the former are left out. [] without
    any note.
    """
    algorithm = [] if _has_user_function(c.algorithm) else _non_default(c, _noted(c.algorithm))
    return [*map(str, algorithm), *_without_prompts(c), *unplanned_memory_notes(c.policy)]


def _without_prompts(c: Config) -> Iterator[str]:
    """Yields a note about evaluation settings if there are no evaluation prompts."""
    defaults = asdict(EvaluationConfig())
    changed = {name: value for name, value in asdict(c.evaluation).items() if value != defaults[name]}
    if not c.data.eval and changed and c.evaluation.every:
        changed_text = ", ".join(f"evaluation.{name}={shown(value)}" for name, value in changed.items())
        yield f"{changed_text}: data.eval=[] has no prompts to evaluate on; give files as data.eval, or leave it out"


def _has_user_function(a: AlgorithmConfig) -> bool:
    return ":" in a.loss or ":" in a.advantage


def _non_default(c: Config, candidates: Iterator[tuple[str, str, str]]) -> Iterator[UserError]:
    """Yields an error for each candidate with a non-default value. A candidate is (key below `algorithm`, reason,
    fix)."""
    for name, why, fix in candidates:
        key = f"algorithm.{name}"
        value = reduce(getattr, name.split("."), c.algorithm)
        if value != (default := keys()[key].default):
            yield UserError(why, key=key, value=shown(value), fix=f"give {fix}, or {key}={shown(default)}")


def _rejected(a: AlgorithmConfig) -> Iterator[tuple[str, str, str]]:
    if a.rejection.level == "off":
        for name in ("low", "high"):
            fix = "algorithm.rejection.level=token, sequence or geometric"
            yield f"rejection.{name}", "it has no effect with algorithm.rejection.level=off", fix
    if a.kl.target is None:
        yield "kl.horizon", "the coefficient has no target to adapt to", "algorithm.kl.target"
    if a.entropy.target is None:
        for name in ("step", "least", "most"):
            yield f"entropy.{name}", "the coefficient has no target to adapt to", "algorithm.entropy.target"
    if not a.overlong.buffer:
        why = "algorithm.overlong.buffer=0 has no tokens that are punished"
        yield "overlong.penalty", why, "algorithm.overlong.buffer"
    if a.dynamic_sampling.mode != "replace":
        why = f"algorithm.dynamic_sampling.mode={a.dynamic_sampling.mode} makes no copies"
        on = "" if a.dynamic_sampling.enabled else "algorithm.dynamic_sampling.enabled=true and "
        yield "dynamic_sampling.replace_from", why, f"{on}algorithm.dynamic_sampling.mode=replace"


def _noted(a: AlgorithmConfig) -> Iterator[tuple[str, str, str]]:
    if a.loss in LOSSES:
        yield from _read_by_other_losses(a.loss)
    if not a.advantage_traits.normalizes:
        why = f"algorithm.advantage={a.advantage} divides by no standard deviation of a group that could be left out"
        normalizing = [name for name, traits in ESTIMATORS.items() if traits.normalizes]
        yield "normalize", why, f"algorithm.advantage={' or '.join(normalizing)}"
    if a.loss_mean != "constant":
        why = f"algorithm.loss_mean={a.loss_mean} divides by no length"
        yield "loss_mean_length", why, "algorithm.loss_mean=constant"
    if a.loss_mean != "micro_batches":
        why = f"algorithm.loss_mean={a.loss_mean} has no groups of samples"
        yield "loss_mean_samples", why, "algorithm.loss_mean=micro_batches"
    if not _uses_sequence_ratios(a):
        why = "neither algorithm.loss nor a correction has one ratio for all tokens of a sequence"
        yield "sequence_unit", why, "algorithm.loss=gspo or gmpo, or algorithm.importance_level=sequence"
    if not a.kl.coefficient:
        yield "kl.mean", "algorithm.kl.coefficient=0 has no KL term", "a coefficient above 0"


def _uses_sequence_ratios(a: AlgorithmConfig) -> bool:
    """Returns True if a loss or correction uses sequence-level ratios."""
    rejection = a.rejection
    bounds = (rejection.outlier_low, rejection.outlier_high, rejection.off_policy)
    return (
        a.loss_traits.sequence_ratio
        or (a.importance_cap is not None and a.importance_level == "sequence")
        or rejection.level in ("sequence", "geometric")
        or any(bound is not None for bound in bounds)
    )


def _read_by_other_losses(loss: str) -> Iterator[tuple[str, str, str]]:
    """Yields settings read only by other losses, except `dual_clip`, because `AlgorithmConfig.refusals` has it."""
    read_here = [name for name in LOSSES[loss].reads if name != "dual_clip"]
    others = {name: other for other in reversed(LOSSES) for name in LOSSES[other].reads if name != "dual_clip"}
    for name, other in sorted(others.items()):
        if name not in read_here:
            read_text = " and ".join(f"algorithm.{name}" for name in read_here)
            yield name, f"algorithm.loss={loss} reads {read_text}, and ignores this", f"algorithm.loss={other}"
