"""Failures of environments: ends the run if all or too many fail, else counts and reports each kind."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from skyrl_mega.common.errors import UserError
from skyrl_mega.common.terminal import printable
from skyrl_mega.envs.registry import BUILT_IN
from skyrl_mega.telemetry.events import Event
from skyrl_mega.trajectories.trajectory import Trajectory

KINDS_SHOWN = 3
"""Number of failure kinds reported with an example."""
KINDS_RECORDED = 20
"""Number of failure kinds of a step recorded as data."""
VARYING = r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"|[\d.]+"
"""Varying parts of error texts of the same kind: quoted text and numbers."""


@dataclass(frozen=True)
class FailureKind:
    """Failures of a step with the same cause."""

    status: str
    """Value of the trajectories' `Status`, such as `error_env`."""
    environment: str
    """Name of the environment."""
    error: str
    """The error text without the varying parts."""
    at: str
    """The line in the environment's file; empty if unknown."""
    count: int
    """Number of trajectories."""
    example: str
    """The first error in full, on a single line."""


def failure_kinds(trajectories: Sequence[Trajectory]) -> list[FailureKind]:
    """Returns the kinds of environment failures among the trajectories, the most frequent first; [] without
    failures."""
    by_kind: dict[tuple[str, str], list[Trajectory]] = {}
    for t in trajectories:
        if t.status.failed:
            by_kind.setdefault(_kind_of(t), []).append(t)
    kinds = [
        FailureKind(
            alike[0].status.value,
            alike[0].prompt.env_class,
            error,
            str(alike[0].metadata.get("at") or ""),
            len(alike),
            _first(alike[0]),
        )
        for (error, _), alike in by_kind.items()
    ]
    return sorted(kinds, key=lambda kind: -kind.count)


def failures(trajectories: Sequence[Trajectory]) -> str | None:
    """Returns a text with the number of failures and the most frequent kinds, with an example of each; None without
    failures."""
    kinds = failure_kinds(trajectories)
    if not kinds:
        return None
    count = f"{sum(kind.count for kind in kinds)} of {len(trajectories)} trajectories failed"
    if len(kinds) == 1:
        return f"{count}; the first error: {kinds[0].example}"
    described = "; ".join(f"{kind.count} times: {kind.example}" for kind in kinds[:KINDS_SHOWN])
    more = sum(kind.count for kind in kinds[KINDS_SHOWN:])
    return f"{count} with {len(kinds)} different errors, {described}" + (f"; {more} times other errors" if more else "")


def failures_event(step: int, trajectories: Sequence[Trajectory]) -> Event | None:
    """Returns the event with the failures of a step by kind; None without failures.

    Args:
        step: The step's number.
        trajectories: Trajectories of the step.
    """
    kinds, text = failure_kinds(trajectories), failures(trajectories)
    if text is None:
        return None
    rows = [asdict(kind) for kind in kinds[:KINDS_RECORDED]]
    return Event("failures", f"step {step}: {text}", step=step, of=len(trajectories), kinds=rows)


def all_failed(trajectories: Sequence[Trajectory]) -> bool:
    """Returns True if the environment of every trajectory failed; False without trajectories."""
    return bool(trajectories) and all(t.status.failed for t in trajectories)


def refuse_broken(trajectories: Sequence[Trajectory], most: float = 1.0) -> None:
    """Raises an error, which ends the run, if the environments of all trajectories failed, or of more than an allowed
    share. Does nothing without failures.

    Args:
        trajectories: Trajectories of a step.
        most: Largest allowed share of failures (`environment.max_failed`).

    Raises:
        UserError: Names the environments, the number of failures, and the first or most frequent error, with the place.
    """
    if all_failed(trajectories):
        first = trajectories[0]
        name = first.prompt.env_class
        raise UserError(
            f"environment {name}: all {len(trajectories)} trajectories failed; the first error: {_first(first)}",
            fix=f"fix {_settings_of(name)}, or the service that it calls",
        )
    failed = [t for t in trajectories if t.status.failed]
    if len(failed) > most * len(trajectories):
        by_environment = Counter(t.prompt.env_class for t in failed).most_common()
        (error, times), *_ = Counter(map(_first, failed)).most_common(1)
        raise UserError(
            f"{len(failed)} of {len(trajectories)} trajectories failed ("
            f"{', '.join((f'{name} {count}' for name, count in by_environment))}), the most frequent error, "
            f"{times} times: {error}; fix the environment, or give a larger share",
            key="environment.max_failed",
            value=f"{most:g}",
        )


def _settings_of(name: str) -> str:
    """Returns the settings that decide what an environment runs, as text for people."""
    return f"environment.options.{name}" if name in BUILT_IN else f"the class in environment.classes.{name}"


def _kind_of(t: Trajectory) -> tuple[str, str]:
    """Returns the features shared by failures of the same kind: the error text without the varying parts, and the
    place."""
    return re.sub(VARYING, "…", str(t.metadata.get("error"))), str(t.metadata.get("at"))


def _first(t: Trajectory) -> str:
    error, at = str(t.metadata.get("error")), t.metadata.get("at")
    return printable(" ".join(f"{error} (at {at})".split()) if at else error)
