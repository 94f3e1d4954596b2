"""Faults of a running cluster, each with the root cause in one line."""

from __future__ import annotations


class ClusterError(RuntimeError):
    """Ray could not be started, reached, or has too little."""


class NodesMissing(ClusterError):
    """Nodes were waited for and did not come."""


class NodeLost(ClusterError):
    """A fault of a session in which a node of the Ray cluster has gone; the message has both."""


class ActorFailed(RuntimeError):
    """An actor died or raised. Names the actor, its rank, the call and the cause."""

    def __init__(self, actor: str, rank: int, method: str, cause: str, others: int = 0) -> None:
        self.actor, self.rank, self.method, self.cause = actor, rank, method, cause
        more = f" ({others} more failed after it)" if others else ""
        super().__init__(f"{actor} (rank {rank}) failed in {method}: {cause}{more}")


class NodeGone(ActorFailed):
    """The node that an actor was to be started on is not there any more."""


class ActorTimeout(ActorFailed):
    """Actors did not answer in time. `silent` names all of them; actor and rank are the first one's."""

    def __init__(self, silent: list[tuple[str, int]], method: str, seconds: float) -> None:
        names = ", ".join(actor for actor, _ in silent[:8]) + (" …" if len(silent) > 8 else "")
        self.silent = silent
        super().__init__(*silent[0], method, f"no answer within {seconds:g} s from {names}")
