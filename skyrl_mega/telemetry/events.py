"""Events of a run: lines for people that carry their facts as data, kept in `events.jsonl`.

Each line of the file is one JSON object: `time` (seconds since 1970), `kind`, `after_step` (the last finished step),
`text` (the sentence that the terminal shows) and the fields of the kind. Reports read the fields, never the sentence.

| kind | what happened | fields |
|---|---|---|
| `started` | a run starts or starts again | `algorithm`, `model`, `layout`, `gpus`, `host`, `commit`, `versions` |
| `settings_changed` | a resumed run has other settings | `changes`: `key old → new` |
| `stage`, `stage_done` | a stage of the start begins, ends | `actors`, `stage`, `count`; at the end also `seconds` |
| `placed` | all actors run | `hosts`, and the ranks on each node by group |
| `step` | a training step finished | `step` |
| `resumed` | the run continues from a checkpoint | `step`, `checkpoint` |
| `fault` | an error ended or restarted the run | `error`, of an actor `actor`, `rank`, `method`, `cause`, `log` |
| `restart` | the run restarts from its newest checkpoint after a fault | `restarts_left` |
| `actor_lost` | an engine or a rollout worker is restarted after a crash | of `fault`; `restarts_left` |
| `actor_given_up` | no restart is left for an engine or a rollout worker | of `actor_lost` |
| `actor_back` | its replacement is up | `actor`, `rank` |
| `engine_differs` | an endpoint has other weights than it states | `actor`, `rank`, `version`, `problem` |
| `engine_joined` | an engine joined the run while it trains | `actor`, `rank`, `address` |
| `engine_not_joined` | an engine that was to join did not come up | `actor`, `rank`, `cause` |
| `engine_left` | an engine left for good: removed, or lost after it had joined | `actor`, `rank`, `cause` |
| `retriever_lost` | the retrieval service ended | `code`, `restarted` |
| `trajectory_failed` | a trajectory failed, having crashed rollout workers | `trajectory`, `environment`, `cause` |
| `failures` | environments failed in a step | `step`, `of`, `kinds` (of `trainer.health.failures.FailureKind`) |
| `drafts` | engines began or ceased to leave out draft tokens in most steps | `step`, `suppressed`: share of steps |
| `health` | a watcher found something (docs/health.md) | `step`, `finding`, `evidence` |
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl_mega.common.errors import UserError
from skyrl_mega.common.safe_read import Malformed, error_reason, parse_json, read_lines

FILE = "events.jsonl"
COMMON = ("time", "kind", "after_step", "text")
"""Fields that every line has."""


class Event(str):
    """A line for people, with its facts: `say(Event("actor_lost", "engine-1 crashed …", actor="engine-1", rank=1))`.

    A subclass of `str`, accepted by every function for lines; `telemetry.console` also writes the facts to
    `events.jsonl`.
    """

    kind: str
    """Kind of the event, from the table at the top of this file."""
    facts: dict[str, Any]
    """JSON values by field name: the fields of the kind."""

    def __new__(cls, kind: str, text: str, **facts: Any) -> Event:
        """Returns the line `text`; `facts` are JSON values."""
        event = super().__new__(cls, text)
        event.kind, event.facts = kind, facts
        return event


@dataclass(frozen=True)
class EventLine:
    """One line of `events.jsonl`."""

    time: float
    """Seconds since 1970."""
    kind: str
    text: str
    after_step: int
    """Number of the last step finished before the event; 0 before the first."""
    facts: dict[str, Any]
    """Fields of the kind: all fields of the line but `COMMON`."""


def row(event: Event, after_step: int) -> dict[str, Any]:
    """Returns the object written to `events.jsonl` for an event: `time` (the present time), `kind`, `after_step`,
    `text`, and the event's facts.

    Args:
        event: The event.
        after_step: Number of the last finished step.
    """
    return {"time": time.time(), "kind": event.kind, "after_step": after_step, "text": str(event), **event.facts}


def read(folder: Path) -> list[EventLine]:
    """Returns the events in `events.jsonl` of a run's folder, in the order of the file.

    Returns an empty list if the file does not exist, and skips incomplete and malformed lines.

    Raises:
        UserError: The file cannot be read.
    """
    file = folder / FILE
    try:
        return [entry for _, text in read_lines(file) if (entry := _entry(text))] if file.is_file() else []
    except (Malformed, OSError) as error:
        raise UserError(error_reason(error), key=file, fix="give a run's folder that you may read") from error


def _entry(text: bytes | str) -> EventLine | None:
    """Returns the event of a line; None if it is no event."""
    try:
        row = parse_json(text)
        facts = {name: value for name, value in row.items() if name not in COMMON}
        return EventLine(float(row["time"]), str(row["kind"]), str(row["text"]), int(row["after_step"]), facts)
    except (Malformed, KeyError, TypeError, ValueError, AttributeError):
        return None
