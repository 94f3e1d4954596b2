"""A run's folder as read by the report: metrics, settings, checkpoints, and the fault of the run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from skyrl_mega.common import safe_read
from skyrl_mega.common.errors import UserError
from skyrl_mega.common.secrets import masked
from skyrl_mega.config.keys import keys
from skyrl_mega.telemetry import events, metrics
from skyrl_mega.telemetry.console import PLACES
from skyrl_mega.telemetry.events import Entry
from skyrl_mega.telemetry.run_dir import checkpoints_in

RECOVERED = ("actor_lost", "retriever_lost", "trajectory_failed")
"""Kinds of events that a run recovers from."""
STUCK = ("health/stuck_steps", "health/stuck_groups")
"""Health metrics other than kinds of findings."""


@dataclass(frozen=True)
class Fault:
    """The error that ended a run, or a part of it."""

    when: str
    """Local time."""
    text: str
    last: bool
    """True if the run was not resumed afterwards."""


@dataclass(frozen=True)
class Finding:
    """A kind of health finding of a run (docs/health.md)."""

    kind: str
    steps: list[int]
    """Steps with the finding."""
    text: str
    """Evidence, as first reported."""


@dataclass(frozen=True)
class RunData:
    """The data of a run."""

    folder: Path
    rows: list[dict[str, float | None]]
    """Rows of metrics.jsonl, in order; step 0 is the evaluation before the first step."""
    settings: dict[str, Any]
    """Dotted key → value for every entry of config.yaml."""

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.absolute().name

    @cached_property
    def names(self) -> list[str]:
        """All metrics, in order of first appearance."""
        return list(dict.fromkeys(name for row in self.rows for name in row if name != "step"))

    @property
    def steps(self) -> int:
        """Number of finished RL steps."""
        return int(self.rows[-1]["step"] or 0) if self.rows else 0

    @property
    def planned(self) -> int | None:
        """Maximum number of RL steps (`run.steps`); None if the run ends with its prompts."""
        return self.settings.get("run.steps")

    def series(self, name: str) -> tuple[list[float], list[float | None]]:
        """Returns steps and values of a metric, for rows with the metric; None for a value that was not finite."""
        having = [row for row in self.rows if name in row]
        return [row["step"] or 0.0 for row in having], [row[name] for row in having]

    @cached_property
    def changed(self) -> dict[str, Any]:
        """Settings with other values than the defaults, including keys unknown to this version."""
        known = keys()
        return {key: value for key, value in self.settings.items() if key not in known or known[key].default != value}

    @property
    def places(self) -> list[tuple[str, Path]]:
        """Name and path of each file or folder in the run's folder."""
        return [(name, self.folder / file) for name, file in PLACES if (self.folder / file).exists()]

    @property
    def checkpoints(self) -> list[tuple[Path, int]]:
        """Complete checkpoints and sizes in bytes."""
        return [
            (folder, sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()))
            for folder in checkpoints_in(self.folder / "checkpoints").values()
            if (folder / "state.json").is_file()
        ]

    @cached_property
    def events(self) -> list[Entry]:
        """The events of the run, in order."""
        return events.read(self.folder)

    @property
    def fault(self) -> Fault | None:
        """The last fault of the run, or None."""
        faults = [i for i, event in enumerate(self.events) if event.kind == "fault"]
        if not faults:
            return None
        event = self.events[faults[-1]]
        resumed = any(later.kind == "step" for later in self.events[faults[-1] + 1 :])
        return Fault(local_time(event), event.text.removeprefix("fault: "), not resumed)

    @cached_property
    def findings(self) -> list[Finding]:
        """Health findings, ordered by first step."""
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
                Finding(kind, at, first_seen[kind][1] if kind in first_seen else "")
                for kind, at in steps_by_kind.items()
            ),
            key=lambda finding: finding.steps[0],
        )

    @property
    def recovered(self) -> list[Entry]:
        """Crashes that the run recovered from: engines, rollout workers, trajectories, the retrieval service."""
        return [event for event in self.events if event.kind in RECOVERED]


def local_time(event: Entry) -> str:
    """Returns the event's local time, such as `2026-01-31 18:05:09`."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.time))


def read(folder: Path) -> RunData:
    """Reads a run's folder.

    Raises:
        UserError: The folder does not belong to a run.
    """
    if not (folder / "config.yaml").is_file():
        what = "no config.yaml there" if folder.is_dir() else "no such folder"
        raise UserError(f"{what}; allowed: a run's folder, such as runs/<name>", key=folder)
    try:
        tree = yaml.safe_load(safe_read.read(folder / "config.yaml", "give a run's folder")) or {}
        safe_read.check_value(tree, numbers=False)
        settings = dict(_leaves(masked(tree), "")) if isinstance(tree, dict) else {}
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"it is not YAML: {' '.join(str(error).split())}", key=folder / "config.yaml") from error
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
