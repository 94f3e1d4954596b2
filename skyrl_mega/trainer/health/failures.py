"""Environments that fail: when nothing else happens the run ends; otherwise the first one is told, and all counted."""

from __future__ import annotations

from collections.abc import Sequence

from skyrl_mega.config.errors import UserError
from skyrl_mega.rollout.trajectory import Trajectory
from skyrl_mega.trainer.health.seen import plain


def failures(trajectories: Sequence[Trajectory]) -> str | None:
    """How many failed and how the first one did, with the place in the environment's own file; None without any."""
    failed = [t for t in trajectories if t.status.failed]
    if not failed:
        return None
    return f"{len(failed)} of {len(trajectories)} trajectories failed, the first one so: {_first(failed[0])}"


def all_failed(trajectories: Sequence[Trajectory]) -> bool:
    """Whether the environment of every trajectory failed; one that works is enough to go on."""
    return bool(trajectories) and all(t.status.failed for t in trajectories)


def refuse_broken(trajectories: Sequence[Trajectory]) -> None:
    """Ends the run when the environment of every trajectory failed.

    Raises:
        UserError: Which environment, what the first one said, and where.
    """
    if all_failed(trajectories):
        first = trajectories[0]
        name = first.prompt.env_class
        raise UserError(
            f"environment {name}: all {len(trajectories)} trajectories failed, the first one so: {_first(first)}; "
            f"fix the class that environment.classes.{name} names, or what it asks"
        )


def _first(t: Trajectory) -> str:
    error, at = str(t.metadata.get("error")), t.metadata.get("at")
    return plain(" ".join(f"{error} (at {at})".split()) if at else error)
