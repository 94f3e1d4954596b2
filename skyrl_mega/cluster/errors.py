"""Faults of a run, each with its root cause in one line and its facts as fields; the cause of an error from Ray."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyrl_mega.cluster.log_errors import with_cause
from skyrl_mega.telemetry.events import Event


class Fault(RuntimeError):
    """A failure, not the user's error, that ends a run or leads to a restart.

    Unlike other exceptions with arguments of their own, a fault keeps its text and fields when Ray pickles it.
    """

    @property
    def facts(self) -> dict[str, Any]:
        """The fields of the fault, as JSON values; {} for a fault without any."""
        return {}

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self), str(self), self.__dict__)


class ClusterError(Fault):
    """Ray could not be started or reached, or lacks resources."""


class NodesMissing(ClusterError):
    """Expected nodes did not join the cluster in time."""


class NodeLost(ClusterError):
    """A session failed and a node of the Ray cluster is gone; the message names both."""


class ActorFailed(Fault):
    """An actor died or raised an error.

    Attributes:
        group: The actor's group: `policy`, `engine`, `rollout`, …
        rank: Its rank in the group; None if the fault concerns the whole group.
        method: The call that failed.
        cause: The root cause in one line, taken from the log if the error only points to the log.
        log: The actor's log file; None without one.

    Args:
        others: Number of further failed calls or requests, for the message.
    """

    def __init__(
        self, group: str, rank: int | None, method: str, cause: str, *, others: int = 0, log: str | None = None
    ) -> None:
        self.group, self.rank, self.method, self.cause, self.log = group, rank, method, with_cause(cause, log), log
        subject = f"{self.actor} (rank {rank})" if rank is not None else self.actor
        more = f" ({others} more failed after it)" if others else ""
        super().__init__(f"{subject} failed in {method}: {self.cause}" + (f"; its log: {log}" if log else "") + more)

    @property
    def actor(self) -> str:
        """The actor's name, such as `engine-2`; the group's name for the whole group."""
        return self.group if self.rank is None else f"{self.group}-{self.rank}"

    @property
    def facts(self) -> dict[str, Any]:
        """The facts of the fault, as JSON values: `actor` (the name), `rank` (None for the whole group), `method`,
        `cause`, and `log` (path of the actor's log; None if unknown)."""
        return {"actor": self.actor, "rank": self.rank, "method": self.method, "cause": self.cause, "log": self.log}


class NodeGone(ActorFailed):
    """The intended node of an actor no longer exists."""


class ActorTimeout(ActorFailed):
    """Actors did not answer in time. `silent` names all, `actor` and `rank` name the first.

    Args:
        silent: Group and rank of each actor without an answer; at least one.
        method: The call without an answer.
        seconds: The time limit.
    """

    def __init__(self, silent: list[tuple[str, int]], method: str, seconds: float) -> None:
        names = ", ".join(f"{group}-{rank}" for group, rank in silent[:8]) + (" …" if len(silent) > 8 else "")
        self.silent = silent
        super().__init__(*silent[0], method, f"no answer within {seconds:g} s from {names}")


def cause_of(error: BaseException) -> BaseException:
    """Returns the exception that an actor's method raised, taken out of Ray's wrapper. Any other error, such as the
    death of an actor, is returned itself."""
    import ray

    cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else None
    return error if cause is None else cause


def describe(error: BaseException | str) -> str:
    """Returns a single line about an error: class name and first line of its text. For an error from an actor, these
    are of the exception raised there; for a dead actor the line says if its node or its process died. An ActorFailed
    gives its method and cause, and a text is returned unchanged."""
    import ray

    if isinstance(error, str):
        return error
    if isinstance(error, ray.exceptions.RayTaskError):  # first: Ray's class is also the class of the cause
        cause = error.cause
        return f"{type(cause).__name__}: {_line(str(cause))}" if cause is not None else _line(str(error))
    if isinstance(error, ActorFailed):
        return f"{error.method}: {error.cause}"
    if isinstance(error, ray.exceptions.ActorUnschedulableError):
        return "its node died"
    if isinstance(error, ray.exceptions.RayActorError):
        if "node has died" in str(error):  # Ray has no exception class for this
            return "its node died"
        return "its process died (killed, out of memory, or crashed)"
    return f"{type(error).__name__}: {_line(str(error))}"


def fault_event(error: BaseException, text: str = "") -> Event:
    """Returns the event `fault` of an error that ends or restarts a run, with the facts of a `Fault`.

    Args:
        error: The error.
        text: The line for people; empty means "fault: " and the error's text.
    """
    facts = error.facts if isinstance(error, Fault) else {}
    return Event("fault", text or f"fault: {error}", error=type(error).__name__, **facts)


def _line(text: str) -> str:
    return next((line.strip() for line in text.strip().splitlines() if line.strip()), "no message")


def _restore(kind: type[Fault], text: str, fields: Mapping[str, Any]) -> Fault:
    fault = kind.__new__(kind, text)
    fault.args = (text,)
    fault.__dict__.update(fields)
    return fault
