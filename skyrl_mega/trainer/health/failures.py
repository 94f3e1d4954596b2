"""Failures of environments: ends the run if all or too many fail, else counts and reports each kind."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from skyrl_mega.common.errors import UserError
from skyrl_mega.trainer.health.step_view import escaped
from skyrl_mega.trajectories.trajectory import Trajectory

KINDS_SHOWN = 3
"""Number of failure kinds reported with an example."""
VARYING = r"'[^']*'|\"[^\"]*\"|[\d.]+"
"""Varying parts of error texts of the same kind: quoted text and numbers."""


def failures(trajectories: Sequence[Trajectory]) -> str | None:
    """Returns the number of failures and the most frequent kinds, with an example of each; None without failures."""
    failed = [t for t in trajectories if t.status.failed]
    if not failed:
        return None
    count = f"{len(failed)} of {len(trajectories)} trajectories failed"
    by_kind: dict[tuple[str, str], list[Trajectory]] = {}
    for t in failed:
        by_kind.setdefault(_kind_of(t), []).append(t)
    if len(by_kind) == 1:
        return f"{count}, the first one so: {_first(failed[0])}"
    by_frequency = sorted(by_kind.values(), key=len, reverse=True)
    described = "; ".join(f"{len(alike)} so: {_first(alike[0])}" for alike in by_frequency[:KINDS_SHOWN])
    more = sum(map(len, by_frequency[KINDS_SHOWN:]))
    return f"{count} in {len(by_kind)} ways, {described}" + (f"; {more} in other ways" if more else "")


def all_failed(trajectories: Sequence[Trajectory]) -> bool:
    """Returns True if the environment of every trajectory failed; a single success is enough to continue."""
    return bool(trajectories) and all(t.status.failed for t in trajectories)


def refuse_broken(trajectories: Sequence[Trajectory], most: float = 1.0) -> None:
    """Ends the run if all environments failed, or more than the allowed share.

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
            f"environment {name}: all {len(trajectories)} trajectories failed, the first one so: {_first(first)}",
            fix=f"fix the class that environment.classes.{name} names, or what it asks",
        )
    failed = [t for t in trajectories if t.status.failed]
    if len(failed) > most * len(trajectories):
        by_environment = Counter(t.prompt.env_class for t in failed).most_common()
        (error, times), *_ = Counter(map(_first, failed)).most_common(1)
        raise UserError(
            f"{len(failed)} of {len(trajectories)} trajectories failed ("
            f"{', '.join((f'{name} {count}' for name, count in by_environment))}), most often so, "
            f"{times} times: {error}; fix it, or give a larger share",
            key="environment.max_failed",
            value=f"{most:g}",
        )


def _kind_of(t: Trajectory) -> tuple[str, str]:
    """Returns the features shared by failures of the same kind: the error text without the varying parts, and the
    place."""
    return re.sub(VARYING, "…", str(t.metadata.get("error"))), str(t.metadata.get("at"))


def _first(t: Trajectory) -> str:
    error, at = str(t.metadata.get("error")), t.metadata.get("at")
    return escaped(" ".join(f"{error} (at {at})".split()) if at else error)
