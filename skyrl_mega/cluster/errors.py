"""Errors of a running cluster, each with the root cause in one line."""

from __future__ import annotations

from typing import Any


class ClusterError(RuntimeError):
    """Ray could not be started or reached, or lacks resources."""


class NodesMissing(ClusterError):
    """Expected nodes did not join the cluster in time."""


class NodeLost(ClusterError):
    """A session failed and a node of the Ray cluster is gone; the message names both."""


class ActorFailed(RuntimeError):
    """An actor died or raised an error. Names the actor, the rank, the call and the cause."""

    def __init__(self, actor: str, rank: int, method: str, cause: str, others: int = 0) -> None:
        self.actor, self.rank, self.method, self.cause = actor, rank, method, cause
        more = f" ({others} more failed after it)" if others else ""
        super().__init__(f"{actor} (rank {rank}) failed in {method}: {cause}{more}")


class NodeGone(ActorFailed):
    """The intended node of an actor no longer exists."""


class ActorTimeout(ActorFailed):
    """Actors did not answer in time. `silent` names all, `actor` and `rank` name the first."""

    def __init__(self, silent: list[tuple[str, int]], method: str, seconds: float) -> None:
        names = ", ".join(actor for actor, _ in silent[:8]) + (" …" if len(silent) > 8 else "")
        self.silent = silent
        super().__init__(*silent[0], method, f"no answer within {seconds:g} s from {names}")


def facts(error: BaseException) -> dict[str, Any]:
    """Returns what an event says of a fault: its class, and of a failed actor who, in which call, and why."""
    found: dict[str, Any] = {"error": type(error).__name__}
    if isinstance(error, ActorFailed):
        found |= {"actor": error.actor, "rank": error.rank, "method": error.method, "cause": error.cause}
    return found
