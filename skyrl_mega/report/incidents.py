"""What went wrong in a run: faults, crashes, findings of the health checks, failures of environments."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from skyrl_mega.common.secrets import hidden
from skyrl_mega.common.terminal import printable
from skyrl_mega.report.document import table
from skyrl_mega.report.run_data import RunData
from skyrl_mega.report.story import local_time
from skyrl_mega.telemetry.events import EventLine

CRASHES = 20
"""Number of crashes shown, the newest."""
FAILURES = 20
"""Number of kinds of failures shown, the most frequent."""


def html(run: RunData, name: str, several: bool) -> str:
    """Returns a run's last fault, crashes of engines, rollout workers and the retrieval service, health findings and
    failed trajectories by kind as HTML; "" without any. Raises UserError if the run's events cannot be read.

    Args:
        run: The run.
        name: Name of the run.
        several: True if the page shows several runs: the name becomes a title.
    """
    parts = [*_fault(run), *_crashes(run), *_findings(run), *_failures(run)]
    title = f"<h3>{escape(name)}</h3>" if several and parts else ""
    return title + "".join(parts)


def text(run: RunData) -> list[str]:
    """Returns a run's health findings and its `FAILURES` most frequent kinds of failures as lines for a terminal, with
    secrets masked; [] without any. Faults and crashes are events of `header.text`. Raises UserError if the run's events
    cannot be read."""
    lines = [f"  noticed: {of.kind}, {steps_text(of.steps)}: {of.text}" for of in run.findings]
    lines += [
        f"  failed: {of.count:,} {of.status}, {steps_text(of.steps)}, such as: {of.example}"
        for of in run.failures[:FAILURES]
    ]
    return [printable(hidden(line)) for line in lines]


def _fault(run: RunData) -> list[str]:
    fault = run.fault
    if fault is None:
        return []
    when = f" at {escape(fault.when)}" if fault.when else ""
    what = "The run ended by a fault" if fault.last else "The run was resumed after a fault"
    kind = "bad" if fault.last else "warn"
    return [f"<div class='fault {kind}'><b>{what}{when}</b><pre>{escape(fault.text)}</pre></div>"]


def _crashes(run: RunData) -> list[str]:
    parts = []
    if lost := run.given_up:
        actors = ", ".join(dict.fromkeys(str(event.facts.get("actor", event.kind)) for event in lost))
        parts.append(_folded(f"given up after a crash, with no restart left: {actors}", lost, "bad"))
    if recovered := run.recovered:
        count = "a crash" if len(recovered) == 1 else f"{len(recovered)} crashes"
        parts.append(_folded(f"recovered from {count}", recovered, "warn"))
    return parts


def _folded(title: str, events: Sequence[EventLine], kind: str) -> str:
    lines = "\n".join(f"{local_time(event.time)}  {event.text}" for event in events[-CRASHES:])
    return f"<details class='fault {kind}'><summary>{escape(title)}</summary><pre>{escape(lines)}</pre></details>"


def _findings(run: RunData) -> list[str]:
    if not run.findings:
        return []
    rows = [
        f"<th>{escape(of.kind)}</th><td class='num'>{steps_text(of.steps)}</td><td>{escape(of.text)}</td>"
        for of in run.findings
    ]
    title = "What the run noticed about itself"
    return [f"<div class='fault warn'><b>{title}</b> <small class='soft'>docs/health.md</small>{table(rows)}</div>"]


def _failures(run: RunData) -> list[str]:
    if not run.failures:
        return []
    rows = [
        f"<td class='num'>{failures.count:,}</td><th>{escape(failures.status)}</th>"
        f"<td class='num'>{steps_text(failures.steps)}</td><td class='text'>{escape(failures.example)}</td>"
        for failures in run.failures[:FAILURES]
    ]
    total = sum(failures.count for failures in run.failures)
    more = f", the most frequent {FAILURES} kinds" if len(run.failures) > FAILURES else ""
    title = f"{total:,} failed trajectories by kind{more}"
    command = f"python -m skyrl_mega.report trajectories {hidden(str(run.folder))} --error TEXT"
    heads = ["count", "status", "steps", "an example"]
    return [
        f"<div class='fault warn'><b>{title}</b>{table(rows, heads)}"
        f"<p class='soft'>The trajectories with an error: <code>{escape(command)}</code></p></div>"
    ]


def steps_text(steps: Sequence[int]) -> str:
    """Returns steps, at least one and in ascending order, as text: `step 3`, or `4 steps, 3 to 9`."""
    if len(steps) == 1:
        return f"step {steps[0]}"
    return f"{len(steps)} steps, {steps[0]} to {steps[-1]}"
