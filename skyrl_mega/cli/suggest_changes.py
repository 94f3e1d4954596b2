"""Comparison of the given settings with the first choice of `--suggest`: what each change gains and costs alone, how
sure the whole gain is, and seconds by phase."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from skyrl_mega.cli.dry_run_time import known_steps
from skyrl_mega.cli.refusal import find_error
from skyrl_mega.cli.suggest_rows import Row, Rows, as_suggestion, row
from skyrl_mega.config.schema import Config
from skyrl_mega.models.registry import architecture
from skyrl_mega.planner.candidates import Change, changed, value_of
from skyrl_mega.planner.rates import Rate
from skyrl_mega.planner.run_time import ErrorBar, columns, error_bar
from skyrl_mega.planner.search import TIE, Suggestion
from skyrl_mega.planner.times import StepTime, step_time
from skyrl_mega.planner.trajectories import Trajectories, assumed

ROWS_WITH_PHASES = 3
"""Number of choices with seconds by phase."""
GROUPS = (
    ("policy.ranks", "policy.layout."),
    ("policy.micro_tokens",),
    ("policy.recompute", "policy.offload_layers"),
    ("policy.optimizer.streamed",),
    ("rollout.",),
    ("residency.keep",),
)
"""Beginnings of the keys of settings that change together: the layout, the micro-batches, recomputation, the streamed
optimizer, the engines, and the parts that stay on a GPU."""


@dataclass(frozen=True)
class SingleChange:
    """A change of the given settings by one of `GROUPS` only, with its costs. What the settings leave to the planner,
    such as `policy.micro_tokens` null, is decided again."""

    change: Change
    """The changed keys with their new values."""
    row: Row | None
    """The changed settings with their costs; None if these cannot run."""
    error: str | None = None
    """Error message of settings that cannot run."""


@dataclass(frozen=True)
class ChoiceComparison:
    """Comparison of the given settings with the first choice."""

    changes: Sequence[SingleChange] = ()
    """Each change made alone, independent of the others."""
    ratio: ErrorBar | None = None
    """Error bar of the first choice's seconds divided by those of the given settings, as factors of the estimate."""
    phases: Mapping[str, StepTime] = field(default_factory=dict)
    """Number of a row → seconds of its step by phase, for the given settings and the first choices."""
    steps: int | None = None
    """Number of RL steps of the run; None if unknown."""


def compare(config: Config, rows: Rows, hf: Mapping[str, Any], used: Sequence[Rate], gpus: int) -> ChoiceComparison:
    """Compares the given settings with the first choice; without changes and error bar unless the search was for as
    many GPUs as the given settings use. Raises UserError if the files of a draft model or head (`rollout.drafts`)
    cannot be used.

    Args:
        config: The given settings, with planned rates.
        rows: Rows of the table.
        hf: The model's config.json.
        used: The rates of the settings with their uncertainties, as from `rates.with_measured`.
        gpus: Number of GPUs of the search.
    """
    comparable = rows.given is not None and rows.given.gpus == gpus
    return ChoiceComparison(
        changes(config, rows, hf) if comparable else [],
        ratio_bar(rows, hf, used) if comparable else None,
        phases(rows, hf),
        known_steps(config),
    )


def changes(config: Config, rows: Rows, hf: Mapping[str, Any]) -> list[SingleChange]:
    """Returns each change from the given settings to the first choice, made alone: the fastest first, and those that
    cannot run last. [] if there is nothing to compare: the given settings cannot run, use another number of GPUs or are
    about as fast (`TIE`), there is no choice, or only one group of settings differs, so that the choice is that change.

    Args:
        config: The given settings, with planned rates.
        rows: Rows of the table.
        hf: The model's config.json.
    """
    if (compared := _compared(rows)) is None:
        return []
    given, first = compared
    groups = differing_groups(given, first)
    if len(groups) < 2 or given.seconds <= (1 + TIE) * first.seconds:
        return []
    made = [_alone(config, first.config, change, hf) for change in groups]
    return sorted(made, key=lambda each: (each.row is None, each.row.seconds if each.row else 0.0))


def _compared(rows: Rows) -> tuple[Suggestion, Suggestion] | None:
    """Returns the given settings and the first choice; None if one is missing, or they use other numbers of GPUs."""
    given, choices = rows.given, rows.choices
    if given is None or not choices or choices[0].gpus != given.gpus:
        return None
    return given.suggestion, choices[0].suggestion


def differing_groups(given: Suggestion, other: Suggestion) -> list[Change]:
    """Returns, for each of `GROUPS` with a difference, the settings of `other` that differ from those of `given`. The
    same number of ranks in place of null, and another order of a list, are no difference."""
    before, after = ({**each.settings, "policy.ranks": each.parallel.ranks} for each in (given, other))
    difference = [(key, value) for key, value in after.items() if _unordered(before.get(key)) != _unordered(value)]
    grouped = (tuple(pair for pair in difference if pair[0].startswith(group)) for group in GROUPS)
    return [change for change in grouped if change]


def _unordered(value: Any) -> Any:
    return sorted(value) if isinstance(value, list) else value


def _alone(given: Config, other: Config, change: Change, hf: Mapping[str, Any]) -> SingleChange:
    keys = dict.fromkeys("rollout" if key.startswith("rollout.") else key for key, _ in change)
    trial = changed(given, tuple((key, value_of(other, key)) for key in keys))
    if error := find_error(trial, hf, planned=True):
        return SingleChange(change, None, str(error))
    decoder = architecture(hf).describe(hf)
    return SingleChange(change, row(as_suggestion(trial, hf, decoder), decoder))


def ratio_bar(rows: Rows, hf: Mapping[str, Any], used: Sequence[Rate]) -> ErrorBar | None:
    """Returns the error bar of the first choice's seconds divided by those of the given settings, as factors of the
    estimated ratio. An input that makes both rows slower by the same factor does not count, but the uncertainty of the
    formulas (`FORMULAS`) counts in full. Trajectories are those of the given settings. None without both rows on
    equally many GPUs. Raises UserError if the files of a draft model or head (`rollout.drafts`) cannot be used.

    Args:
        rows: Rows of the table.
        hf: The model's config.json.
        used: The rates of the settings with their uncertainties, as from `rates.with_measured`.
    """
    if (compared := _compared(rows)) is None:
        return None
    decoder = architecture(hf).describe(hf)
    given, first = compared
    mean = assumed(given.config, given.parallel)
    lengths = columns(given.config, given.parallel, mean)

    def ratio(config: Config, trajectories: Trajectories) -> float:
        other = replace(first.config, cluster=config.cluster)  # with the rates of `config`
        seconds = step_time(config, decoder, given.parallel, trajectories=trajectories).step
        return step_time(other, decoder, first.parallel, trajectories=trajectories).step / seconds

    dynamic = given.config.algorithm.dynamic_sampling.enabled
    return error_bar(ratio, given.config, mean, used, [lengths["short"], lengths["limit"]], signal=dynamic)


def phases(rows: Rows, hf: Mapping[str, Any]) -> dict[str, StepTime]:
    """Returns the number of a row → estimated seconds of its step by phase, as in the dry run's column *mean*, but with
    a sync at the rate of one copy into a node: for the given settings (0), and the first `ROWS_WITH_PHASES` choices;
    empty without choices. Raises UserError if the files of a draft model or head (`rollout.drafts`) cannot be used.

    Args:
        rows: Rows of the table.
        hf: The model's config.json.
    """
    if not rows.choices:
        return {}
    decoder = architecture(hf).describe(hf)
    shown = {
        str(number): row.suggestion for number, row in enumerate((rows.given, *rows.choices[:ROWS_WITH_PHASES])) if row
    }
    return {number: step_time(each.config, decoder, each.parallel) for number, each in shown.items()}
