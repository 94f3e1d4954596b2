"""A run's folder as read by the report: metrics, settings, checkpoints, and the fault of the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml

from skyrl_mega.common import safe_read
from skyrl_mega.common.errors import UserError
from skyrl_mega.common.secrets import masked
from skyrl_mega.config.keys import keys
from skyrl_mega.report import story
from skyrl_mega.telemetry import events, metrics
from skyrl_mega.telemetry.console import PLACES
from skyrl_mega.telemetry.events import EventLine
from skyrl_mega.telemetry.run_dir import checkpoints_in

RETRIEVER_LOST = "retriever_lost"
"""Kind of the event of a crash of the retrieval service."""
RECOVERED = ("actor_lost", RETRIEVER_LOST, "trajectory_failed")
"""Kinds of events that a run recovers from, unless they are in `RunData.given_up`."""
GIVEN_UP = "actor_given_up"
"""Kind of the event of a crash without a restart left."""
STUCK = ("health/stuck_steps", "health/stuck_groups")
"""Health metrics other than kinds of findings."""


@dataclass(frozen=True)
class RunFault:
    """The error that ended a run, or a part of it."""

    when: str
    """Local time."""
    text: str
    last: bool
    """True if the run was not resumed afterwards."""


@dataclass(frozen=True)
class FindingKind:
    """A kind of health finding of a run (docs/health.md)."""

    kind: str
    """Name of the finding, as in `health/<kind>`."""
    steps: list[int]
    """Steps with the finding."""
    text: str
    """Evidence, as first reported."""


@dataclass(frozen=True)
class Failures:
    """Failed trajectories of a run with the same cause."""

    status: str
    """Status of the trajectories."""
    environment: str
    """Name of the environment."""
    count: int
    """Number of trajectories."""
    steps: list[int]
    """Steps with such failures."""
    example: str
    """The first error in full."""


@dataclass(frozen=True)
class RunData:
    """Content of a run's folder for reports. Events are read on first use: fields made from events raise UserError if
    `events.jsonl` cannot be read."""

    folder: Path
    """The run's folder."""
    rows: list[dict[str, float | None]]
    """Rows of metrics.jsonl, in order; step 0 is the evaluation before the first step."""
    settings: dict[str, Any]
    """Dotted key → value for every entry of config.yaml."""

    @property
    def name(self) -> str:
        """Name of the run's folder."""
        return self.folder.absolute().name

    @cached_property
    def names(self) -> list[str]:
        """Names of all metrics of the run, in order of first appearance."""
        return list(dict.fromkeys(name for row in self.rows for name in row if name != "step"))

    @property
    def steps(self) -> int:
        """Number of finished RL steps, from the newest row of metrics; 0 before the first."""
        return int(self.rows[-1]["step"] or 0) if self.rows else 0

    @property
    def planned(self) -> int | None:
        """Maximum number of RL steps (`run.steps`); None if the run ends with its prompts."""
        return self.settings.get("run.steps")

    def series(self, name: str) -> tuple[list[float], list[float | None]]:
        """Returns steps and values of a metric, for rows with the metric, in order; two empty lists for an unknown
        metric; None for a value that was not finite."""
        having = [row for row in self.rows if name in row]
        return [row["step"] or 0.0 for row in having], [row[name] for row in having]

    def values(self, name: str) -> list[float]:
        """Returns the finite values of a metric, in order; [] for an unknown metric."""
        return [value for row in self.rows if (value := row.get(name)) is not None]

    @cached_property
    def changed(self) -> dict[str, Any]:
        """Settings with other values than the defaults, including keys unknown to this version."""
        known = keys()
        return {key: value for key, value in self.settings.items() if key not in known or known[key].default != value}

    @property
    def places(self) -> list[tuple[str, Path]]:
        """Name and path of each known result (`console.PLACES`) present in the run's folder."""
        return [(name, self.folder / file) for name, file in PLACES if (self.folder / file).exists()]

    @property
    def checkpoints(self) -> list[tuple[Path, int]]:
        """(Folder, size in bytes) of each complete checkpoint, in order of steps."""
        return [
            (folder, sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()))
            for folder in checkpoints_in(self.folder / "checkpoints").values()
            if (folder / "state.json").is_file()
        ]

    @cached_property
    def events(self) -> list[EventLine]:
        """Events of the run, in order; read from `events.jsonl` on first use. Raises UserError if the file cannot be
        read."""
        return events.read(self.folder)

    @property
    def fault(self) -> RunFault | None:
        """Last fault of the run; None for a run without a fault. Made from events."""
        faults = [i for i, event in enumerate(self.events) if event.kind == "fault"]
        if not faults:
            return None
        event = self.events[faults[-1]]
        resumed = any(later.kind == "step" for later in self.events[faults[-1] + 1 :])
        return RunFault(story.local_time(event.time), event.text.removeprefix("fault: "), not resumed)

    @cached_property
    def findings(self) -> list[FindingKind]:
        """Health findings by kind, ordered by their first step: from the metrics `health/…`, and from the events
        `health`, which give the text. Steps are those of the metrics, else the step of the first event."""
        first_seen: dict[str, tuple[int, str]] = {}
        for event in self.events:
            if event.kind == "health" and isinstance(step := event.facts.get("step"), int):
                first_seen.setdefault(str(event.facts.get("finding")), (step, str(event.facts.get("evidence"))))
        steps: dict[str, list[int]] = {kind: [] for kind in first_seen}
        for row in self.rows:
            for name in row:
                if name.startswith("health/") and name not in STUCK:
                    steps.setdefault(name.removeprefix("health/"), []).append(int(row["step"] or 0))
        steps_by_kind = {kind: at or [first_seen[kind][0]] for kind, at in steps.items()}
        return sorted(
            (
                FindingKind(kind, at, first_seen[kind][1] if kind in first_seen else "")
                for kind, at in steps_by_kind.items()
            ),
            key=lambda finding: finding.steps[0],
        )

    @cached_property
    def failures(self) -> list[Failures]:
        """Failed trajectories by kind, the most frequent first. Steps repeated after a resume count once."""
        by_step: dict[int, list[dict[str, Any]]] = {}
        for event in self.events:
            step = event.facts.get("step")
            if event.kind == "resumed" and isinstance(step, int):
                by_step = {at: kinds for at, kinds in by_step.items() if at <= step}
            elif event.kind == "failures" and isinstance(step, int) and isinstance(event.facts.get("kinds"), list):
                by_step[step] = [kind for kind in event.facts["kinds"] if isinstance(kind, dict)]
        alike: dict[tuple[str, ...], list[tuple[int, dict[str, Any]]]] = {}
        for step, kinds in sorted(by_step.items()):
            for kind in kinds:
                key = tuple(str(kind.get(name)) for name in ("status", "environment", "error", "at"))
                alike.setdefault(key, []).append((step, kind))
        failures = [
            Failures(
                status,
                environment,
                sum(count for _, kind in same if isinstance(count := kind.get("count"), int)),
                [step for step, _ in same],
                str(same[0][1].get("example")),
            )
            for (status, environment, *_), same in alike.items()
        ]
        return sorted(failures, key=lambda of: -of.count)

    @cached_property
    def starts(self) -> list[story.RunStart]:
        """The starts of the run, in order; empty before the event `started`."""
        return story.starts(self.events)

    @cached_property
    def marks(self) -> list[story.StepMark]:
        """Marks of resumes and failures for plots over steps."""
        return story.marks(self.events)

    @property
    def recovered(self) -> list[EventLine]:
        """Events of crashes that the run recovered from: of engines, rollout workers, trajectories, the retrieval
        service. A crash of an engine or a rollout worker without a restart is in `given_up` instead, even if the run
        continued with the others."""
        lost = self.given_up
        return [event for event in self.events if event.kind in (*RECOVERED, GIVEN_UP) and event not in lost]

    @property
    def given_up(self) -> list[EventLine]:
        """Events of crashes without a restart in the same start of the run: of engines, rollout workers, the retrieval
        service."""
        return [
            event
            for i, event in enumerate(self.events)
            if (event.kind == GIVEN_UP and not _is_back(event.facts.get("actor"), self.events[i + 1 :]))
            or (event.kind == RETRIEVER_LOST and event.facts.get("restarted") is False)
        ]


def _is_back(actor: Any, later: Sequence[EventLine]) -> bool:
    """Returns True if an actor was restarted after all, before the next start of the run."""
    same_start = takewhile(lambda event: event.kind not in ("started", "fault", "restart"), later)
    return any(event.kind == "actor_back" and event.facts.get("actor") == actor for event in same_start)


def read(folder: Path) -> RunData:
    """Reads settings and metrics from a run's folder; secrets in the settings are masked. Without `metrics.jsonl`, as
    before the first step, `rows` is empty. Events are read later, on first use.

    Raises:
        UserError: The folder has no `config.yaml`, or a file cannot be read.
    """
    if not (folder / "config.yaml").is_file():
        what = "no config.yaml there" if folder.is_dir() else "no such folder"
        raise UserError(f"{what}; allowed: a run's folder, such as runs/<name>", key=folder)
    try:
        tree = yaml.safe_load(safe_read.read(folder / "config.yaml", "give a run's folder")) or {}
        safe_read.check_value(tree, numbers=False)
        settings = dict(_leaves(masked(tree), "")) if isinstance(tree, dict) else {}
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(
            f"it is not YAML: {' '.join(str(error).split())}",
            key=folder / "config.yaml",
            fix="bring back the file that the run wrote, or give another run",
        ) from error
    file = folder / "metrics.jsonl"
    return RunData(folder, metrics.read(file) if file.is_file() else [], settings)


def _leaves(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yields dotted keys and values. A mapping used as a single setting (`rollout.options`) stays whole."""
    known = keys()
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and not (key in known and known[key].type is dict):
            yield from _leaves(value, f"{key}.")
        else:
            yield key, value
