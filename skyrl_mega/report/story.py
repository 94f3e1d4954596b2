"""The story of a run, read from the events: starts, changes in between, restarts, and the marks of plots."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from skyrl_mega.telemetry.events import EventLine
from skyrl_mega.telemetry.table import duration

TOLD = (
    *("started", "settings_changed", "resumed", "fault", "restart", "actor_lost", "actor_given_up", "actor_back"),
    *("engine_joined", "engine_not_joined", "engine_left", "retriever_lost", "trajectory_failed"),
)
"""Kinds of events in the list of a run's events."""
MARKED = ("restart", "actor_lost", "actor_given_up", "engine_joined", "engine_left", "retriever_lost")
"""Kinds of events with a mark in plots, beside resumes."""
MARKS = 60
"""Maximum number of marks in a plot; the marks of resumes are kept first."""


@dataclass(frozen=True)
class StageTime:
    """A stage of a start, such as loading the model in the engines."""

    actors: str
    """Group of actors, or `driver`."""
    stage: str
    """Name of the stage."""
    count: int
    """Number of actors; 0 for the driver."""
    seconds: float | None
    """Duration; None for a stage without an end."""


@dataclass
class RunStart:
    """A start of a run, and everything up to the next start."""

    began: float
    """Seconds since 1970."""
    ended: float
    """Time of the last event before the next start."""
    facts: Mapping[str, Any]
    """Fields of the event `started`."""
    hosts: list[str] = field(default_factory=list)
    """Hosts of all actors; empty until they are placed."""
    resumed_after: int | None = None
    """The step from which the run resumed; None for a run from the beginning."""
    changes: list[str] = field(default_factory=list)
    """Changed settings and facts, as `name old → new`."""
    stages: list[StageTime] = field(default_factory=list)

    @property
    def gpu_hours(self) -> float:
        """Number of GPUs × hours from the start to the last event; 0 on CPUs."""
        gpus = self.facts.get("gpus")
        return (gpus if isinstance(gpus, int) else 0) * (self.ended - self.began) / 3600


@dataclass(frozen=True)
class StepMark:
    """A mark in plots over steps."""

    step: float
    """Position: half a step after the last finished step."""
    kind: str
    """`resumed`, `changed` for a resume with other settings, or `failure`."""
    text: str


def starts(events: Sequence[EventLine]) -> list[RunStart]:
    """Returns the starts of a run, in order, from its events; empty without an event `started`."""
    all_starts: list[RunStart] = []
    changes: list[str] = []
    for event in events:
        if event.kind == "settings_changed":
            changes += _texts(event.facts.get("changes"))
            continue
        if event.kind == "started":
            all_starts.append(RunStart(event.time, event.time, event.facts, changes=changes))
            changes = []
        if not all_starts:
            continue
        start = all_starts[-1]
        start.ended = max(start.ended, event.time)
        if event.kind == "placed":
            start.hosts = _texts(event.facts.get("hosts"))
        elif event.kind == "resumed" and isinstance(step := event.facts.get("step"), int):
            start.resumed_after = step
        elif event.kind in ("stage", "stage_done"):
            _add_stage(start, event)
    for before, after in pairwise(all_starts):
        after.changes += _changed_facts(before, after)
    return all_starts


def _add_stage(start: RunStart, event: EventLine) -> None:
    actors, stage = str(event.facts.get("actors")), str(event.facts.get("stage"))
    count, seconds = event.facts.get("count"), event.facts.get("seconds")
    row = StageTime(
        actors,
        stage,
        count if isinstance(count, int) else 0,
        float(seconds) if isinstance(seconds, int | float) else None,
    )
    opened = [i for i, of in enumerate(start.stages) if (of.actors, of.stage, of.seconds) == (actors, stage, None)]
    if event.kind == "stage_done" and opened:
        start.stages[opened[-1]] = row
    else:
        start.stages.append(row)


def _changed_facts(before: RunStart, after: RunStart) -> Iterator[str]:
    """Yields the changes of source code, versions and hosts between two starts."""
    pairs = [("commit", before.facts.get("commit"), after.facts.get("commit"))]
    old, new = (_mapping(start.facts.get("versions")) for start in (before, after))
    pairs += [(name, old.get(name), new.get(name)) for name in dict.fromkeys([*old, *new])]
    if before.hosts and after.hosts:
        pairs.append(("hosts", ", ".join(before.hosts), ", ".join(after.hosts)))
    for name, a, b in pairs:
        if a != b:
            yield f"{name} {a or 'unknown'} → {b or 'unknown'}"


def marks(events: Sequence[EventLine]) -> list[StepMark]:
    """Returns the marks of resumes and failures for plots over steps, in order; events at the same position share a
    mark. At most `MARKS` are returned: all resumes are kept before any failure, earlier before later ones."""
    by_step: dict[float, StepMark] = {}
    for start in starts(events):
        if start.resumed_after is not None:
            text = "\n".join([f"resumed after step {start.resumed_after}", *start.changes])
            kind = "changed" if start.changes else "resumed"
            _add_mark(by_step, StepMark(start.resumed_after + 0.5, kind, text))
    for event in events:
        if event.kind in MARKED:
            _add_mark(by_step, StepMark(event.after_step + 0.5, "failure", event.text.partition("\n")[0]))
    kept = sorted(by_step.values(), key=lambda mark: (mark.kind == "failure", mark.step))[:MARKS]
    return sorted(kept, key=lambda mark: mark.step)


def _add_mark(by_step: dict[float, StepMark], mark: StepMark) -> None:
    """Adds a mark, joined with an earlier mark at the same position."""
    if (earlier := by_step.get(mark.step)) is not None:
        kinds = {earlier.kind, mark.kind}
        kind = next(kind for kind in ("changed", "resumed", "failure") if kind in kinds)
        mark = StepMark(mark.step, kind, f"{earlier.text}\n{mark.text}")
    by_step[mark.step] = mark


def lines(events: Sequence[EventLine]) -> list[tuple[str, str, str]]:
    """Returns (local time, step, text) of each event in the list of a run's events (`TOLD`).

    The step is a text such as `after 3`, or empty. Returns an empty list if there is nothing but a single start.
    """
    told = [event for event in events if event.kind in TOLD]
    if all(event.kind == "started" for event in told[:1]) and len(told) <= 1:
        return []
    rows = []
    for event in told:
        changes = _texts(event.facts.get("changes")) if event.kind == "settings_changed" else []
        text = "\n".join(["settings changed", *changes]) if changes else event.text
        after = "" if event.kind in ("started", "settings_changed") else f"after {event.after_step}"
        rows.append((local_time(event.time), after, text))
    return rows


def stages_text(start: RunStart) -> str:
    """Returns the durations of a start's stages, a line per group: `driver: read data 1.0 s, start ray 4.0 s`; empty
    without stages."""
    by_actors: dict[str, list[str]] = {}
    for stage in start.stages:
        seconds = "did not end" if stage.seconds is None else duration(stage.seconds)
        by_actors.setdefault(stage.actors, []).append(f"{stage.stage} {seconds}")
    return "\n".join(f"{actors}: {', '.join(times)}" for actors, times in by_actors.items())


def local_time(seconds: float) -> str:
    """Returns a time in seconds since 1970 as local time, such as `2026-01-31 18:05:09`; "unknown time" if out of
    range."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):  # a damaged file
        return "unknown time"


def _texts(value: Any) -> list[str]:
    return [str(text) for text in value] if isinstance(value, list) else []


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
