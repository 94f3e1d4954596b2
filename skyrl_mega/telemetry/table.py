"""The table of steps: displayed metrics and number formats."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class TableColumn:
    """A column: heading, displayed metric, and width."""

    title: str
    metric: str
    """Metric name, or `eval/*/mean` for the mean over evaluation sets; shown only if every set reports the metric."""
    width: int = 8
    """Characters of a cell, without the space before it."""


COLUMNS = (
    TableColumn("reward", "reward/mean", 7),
    TableColumn("eval", "eval/*/mean", 7),
    TableColumn("loss", "policy/loss", 9),
    TableColumn("entropy", "policy/entropy"),
    TableColumn("grad", "policy/grad_norm"),
    TableColumn("mismatch", "mismatch/logprob_abs_mean", 9),
    TableColumn("tokens/s", "perf/tokens_per_s", 9),
    TableColumn("seconds", "time/step"),
    TableColumn("generate", "time/generate", 9),
    TableColumn("logprobs", "time/logprobs", 9),
    TableColumn("train", "time/train", 7),
    TableColumn("sync", "time/sync", 7),
)
ABSENT = "·"
"""Text of a missing number."""


def header() -> str:
    """Returns the line of headings of the table of steps, aligned with `row`."""
    return "step".rjust(6) + "".join(column.title.rjust(column.width + 1) for column in COLUMNS)


def row(step: int, metrics: Mapping[str, float]) -> str:
    """Returns the table row of a step for the terminal; a missing metric is shown as a dot."""
    return f"{step:6d}" + "".join(number(_value(column.metric, metrics)).rjust(column.width + 1) for column in COLUMNS)


def number(value: float | None) -> str:
    """Returns a number in at most seven characters, such as `0.123`, `4567` or `1e-05`; `ABSENT` for None."""
    if value is None:
        return ABSENT
    if not math.isfinite(value):
        return str(value)
    if value and (abs(value) < 1e-3 or abs(value) >= 1e6):
        return f"{value:.0e}"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3f}" if abs(value) < 100 else f"{value:.1f}"


def duration(seconds: float) -> str:
    """Returns a duration for people: 4.1 s, 2 min 5 s, 3 h 12 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _value(metric: str, metrics: Mapping[str, float]) -> float | None:
    before, star, after = metric.partition("*")
    if not star:
        return metrics.get(metric)
    sets = {name.removeprefix(before).partition("/")[0] for name in metrics if name.startswith(before)}
    values = [metrics[name] for set_name in sets if (name := f"{before}{set_name}{after}") in metrics]
    return sum(values) / len(values) if values and len(values) == len(sets) else None
