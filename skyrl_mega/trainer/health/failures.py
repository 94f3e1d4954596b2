"""Environments that fail: where all do, or too many, the run ends; else each way is told, and all are counted."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from skyrl_mega.config.errors import UserError
from skyrl_mega.rollout.trajectory import Trajectory
from skyrl_mega.trainer.health.seen import plain

WAYS = 3
"""Kinds of failures of which an example is told."""
DIFFERS = r"'[^']*'|\"[^\"]*\"|[\d.]+"
"""What differs between errors of one kind: what is quoted, and numbers."""


def failures(trajectories: Sequence[Trajectory]) -> str | None:
    """Returns how many failed and in which ways, the most frequent ones with an example; None if none failed."""
    failed = [t for t in trajectories if t.status.failed]
    if not failed:
        return None
    count = f"{len(failed)} of {len(trajectories)} trajectories failed"
    ways: dict[tuple[str, str], list[Trajectory]] = {}
    for t in failed:
        ways.setdefault(_way(t), []).append(t)
    if len(ways) == 1:
        return f"{count}, the first one so: {_first(failed[0])}"
    often = sorted(ways.values(), key=len, reverse=True)
    told = "; ".join(f"{len(alike)} so: {_first(alike[0])}" for alike in often[:WAYS])
    more = sum(map(len, often[WAYS:]))
    return f"{count} in {len(ways)} ways, {told}" + (f"; {more} in other ways" if more else "")


def all_failed(trajectories: Sequence[Trajectory]) -> bool:
    """Whether the environment of every trajectory failed; one that works is enough to go on."""
    return bool(trajectories) and all(t.status.failed for t in trajectories)


def refuse_broken(trajectories: Sequence[Trajectory], most: float = 1.0) -> None:
    """Ends the run when the environment of every trajectory failed, or of more than may.

    Args:
        trajectories: Of one step.
        most: Share of them that may fail (`environment.max_failed`).

    Raises:
        UserError: Which environments, how many, what the first one or most of them said, and where.
    """
    if all_failed(trajectories):
        first = trajectories[0]
        name = first.prompt.env_class
        raise UserError(
            f"environment {name}: all {len(trajectories)} trajectories failed, the first one so: {_first(first)}; "
            f"fix the class that environment.classes.{name} names, or what it asks"
        )
    failed = [t for t in trajectories if t.status.failed]
    if len(failed) > most * len(trajectories):
        by_environment = Counter(t.prompt.env_class for t in failed).most_common()
        (error, times), *_ = Counter(map(_first, failed)).most_common(1)
        raise UserError(
            f"environment.max_failed = {most:g}: {len(failed)} of {len(trajectories)} trajectories failed "
            f"({', '.join(f'{name} {count}' for name, count in by_environment)}), most often so, {times} times: "
            f"{error}; fix it, or give a larger share"
        )


def _way(t: Trajectory) -> tuple[str, str]:
    """Returns what failures of one kind have in common: the error without what differs in it, and the place."""
    return re.sub(DIFFERS, "…", str(t.metadata.get("error"))), str(t.metadata.get("at"))


def _first(t: Trajectory) -> str:
    error, at = str(t.metadata.get("error")), t.metadata.get("at")
    return plain(" ".join(f"{error} (at {at})".split()) if at else error)
