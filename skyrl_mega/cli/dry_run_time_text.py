"""Sections of a dry run about time: seconds in three columns, the run's line with its error bar, and the rates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyrl_mega.common.tables import aligned

Values = Mapping[str, Any]
HEADS = {"short": "short", "mean": "mean", "limit": "at the limit"}
TOKENS = {"written": "tokens written", "read": "tokens read"}
PHASES = ("generate", "tools", "logprobs", "critic", "train", "sync", "residency", "other")
SHARES = {
    "evaluation": "evaluation, its share",
    "checkpoint": "checkpoint, its share",
    "whole": "a step with its shares",
}
OPTIONAL = ("tools", "critic", "residency", "other", *SHARES)
"""Rows left out if they are 0 in every column."""
DIGITS = 4
"""Digits shown of a rate that is no whole number."""
HOURS = 2.0
"""Days below this number of hours are shown as hours."""


def sections(time: Values) -> list[list[str]]:
    """Returns the three sections about time, each as its lines: the seconds of a step, the run with its error bar, and
    the rates.

    Args:
        time: Value `time` of `dry_run.values`.
    """
    return [_seconds(time), [*_run(time), *_causes(time)], _rates(time)]


def duration(seconds: float) -> str:
    """Returns a duration with its unit: `3.1 days`, `5.2 hours` or `40.0 minutes`; hours from two hours on, days from
    two days on."""
    for unit, name in ((86400.0, "days"), (3600.0, "hours")):
        if seconds >= HOURS * unit:
            return f"{seconds / unit:,.1f} {name}"
    return f"{seconds / 60:,.1f} minutes"


def run_text(run: Values) -> str:
    """Returns steps, duration and GPU-hours of a run, with the ends of the error bar, as a line.

    Args:
        run: Entry `run` of the value `time` of `dry_run.values`.
    """
    seconds, hours, cost = run["seconds"], run["gpu_hours"], ""
    if run["gpus"]:
        cost = (
            f", {hours['estimate']:,.0f} GPU-hours ({hours['low']:,.0f} to {hours['high']:,.0f}) of {run['gpus']} GPUs"
        )
        kinds = run["gpu_hours_by_kind"]
        if len(kinds) > 1:
            cost += f": {', '.join(f'{name} {value:,.0f}' for name, value in kinds.items())}"
    steps = f"{run['steps']:,} step{'s' * (run['steps'] != 1)}{'' if run['steps_known'] else ' (assumed)'}"
    ends = f"{duration(seconds['low'])} to {duration(seconds['high'])}"
    return f"{steps} take about {duration(seconds['estimate'])} ({ends}){cost}"


def summary(time: Values) -> list[str]:
    """Returns the lines about the run for the top of a report: duration, what is missing in it, meaning of the range.

    Args:
        time: Value `time` of `dry_run.values`.
    """
    run, parts = time["run"], [part.partition(" (")[0] for part in time["not_counted"]]
    unknown = f"  {run['steps']:,} steps are assumed: run.steps is null, and data.train is not on this machine"
    return [
        run_text(run),
        *([] if run["steps_known"] else [unknown]),
        f"  not counted: {', '.join(parts)}",
        "  the range combines uncertain inputs listed under run, mostly assumed: no level of confidence is measured",
    ]


def _seconds(time: Values) -> list[str]:
    columns = time["columns"]
    keys = [*PHASES, "step", "evaluation", "checkpoint", "whole"]
    if not any(column[name] for column in columns.values() for name in ("evaluation", "checkpoint")):
        keys.remove("whole")
    shown = [key for key in keys if key not in OPTIONAL or any(column[key] for column in columns.values())]
    rows = [("", *HEADS.values())]
    rows += [(TOKENS[key], *(f"{columns[name][key]:,.0f}" for name in HEADS)) for key in TOKENS]
    rows += [(SHARES.get(key, key), *(seconds_text(columns[name][key]) for name in HEADS)) for key in shown]
    speed = [f"{columns[name]['tokens_per_second_per_gpu']:,.0f}" for name in HEADS]
    if time["run"]["gpus"]:
        rows += [("tokens/s/GPU", *speed), ("MFU", *(f"{columns[name]['mfu']:.1%}" for name in HEADS))]
    else:  # no peak of a CPU is known
        rows.append(("tokens/s/process", *speed))
    ahead = columns["mean"]["ahead"]
    lines = [f"  {ahead:.1f} s of generating go on while the policy works"] if ahead else []
    return [f"seconds of an RL step; {_lengths(time['trajectories'])}", *aligned(rows), *lines]


def seconds_text(seconds: float) -> str:
    """Returns seconds with one decimal, or with three for short times."""
    return f"{seconds:,.1f}" if seconds >= 1 or not seconds else f"{seconds:.3f}"


def _lengths(trajectories: Values) -> str:
    if trajectories["lengths"] == "assumed":
        source = "lengths are assumed (cluster.rates.length_share; give --tokens MEAN,SIGMA or --like RUN)"
    else:
        source = f"lengths are given by {trajectories['lengths']}"
    if not trajectories["environment_s"]:
        return source
    seconds = f"{trajectories['environment_s']:,.1f} s of the environment by {trajectories['environment']}"
    return f"{source}, {seconds}, {trajectories['turns']:.0f} turns"


def _run(time: Values) -> list[str]:
    run = time["run"]
    parts = [
        f"{run[name]:,} {word}{'s' * (run[name] != 1)} of {run[f'{key}_s']:,.1f} s"
        for name, word, key in (
            ("evaluations", "evaluation", "evaluation"),
            ("checkpoints", "checkpoint", "checkpoint"),
        )
        if run[f"{key}_s"]
    ]
    return [
        f"run: {run_text(run)}",
        *([f"  with {' and '.join(parts)}"] if parts else []),
        *(
            []
            if run["steps_known"]
            else ["  the number of steps is unknown: run.steps is null, and data.train is not on this machine"]
        ),
        *(f"  not counted: {part}" for part in time["not_counted"]),
    ]


def _causes(time: Values) -> list[str]:
    low, high = time["run"]["factors"]
    rows = [(cause["name"], f"×{cause['low']:.2f}", f"×{cause['high']:.2f}") for cause in time["causes"]]
    return [f"  error bar ×{low:.2f} to ×{high:.2f}, from each uncertain input alone:", *aligned(rows)]


def _rates(time: Values) -> list[str]:
    rows = [("cluster.", "value", "within", "source")]
    for rate in time["rates"]:
        within = "exact" if rate["factor"] == 1 else f"×{rate['factor']:g}"
        value = rate["value"] if rate["value"] == round(rate["value"]) else float(f"{rate['value']:.{DIGITS}g}")
        rows.append((rate["key"].removeprefix("cluster."), f"{value:,.12g}", within, rate["source"]))
    return ["rates", *aligned(rows, ragged=True)]
