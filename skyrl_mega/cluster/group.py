"""Groups of actors: every call bounded, the first cause of a failure named, nothing left behind."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl_mega.cluster import guard
from skyrl_mega.cluster.errors import ActorFailed, ActorTimeout
from skyrl_mega.cluster.host import Seat, Whereabouts, hosted, machine
from skyrl_mega.cluster.placement import Placement
from skyrl_mega.config.errors import UserError

SETTLE_S = 2.0
"""After a first failure: how long others are listened to. A dead actor's peers complain before Ray has noticed the
death."""
END_S = 10.0
"""How long the processes of killed actors may take to be gone."""


@dataclass(frozen=True)
class Call:
    """One call under way at one actor."""

    actor: str
    rank: int
    method: str
    ref: Any
    log: str | None = None


class ActorGroup:
    """Actors of one class, by rank."""

    def __init__(self, name: str, actors: list[Any], placement: Placement | None = None) -> None:
        self.name, self.actors, self.placement = name, actors, placement
        self.logs: list[str | None] = [None] * len(actors)
        self.where: list[Whereabouts] = []
        self._ended = False

    @classmethod
    def spawn(
        cls,
        name: str,
        actor_class: type,
        arguments: Sequence[dict[str, Any]],
        *,
        timeout: float,
        placement: Placement | None = None,
        env: dict[str, str] | None = None,
        logs: Path | None = None,
    ) -> ActorGroup:
        """Starts one actor per entry of `arguments` and waits until all of them are up.

        Args:
            name: Names the group in errors, and its log files `<logs>/<name>-<rank>.log`.
            actor_class: A plain class; methods that are `async def` make its actors concurrent.
            arguments: Keyword arguments of each rank's constructor.
            timeout: Seconds until the last constructor has returned.
            placement: Reserved slots by rank; the group releases them at its end. None leaves the choice to Ray.
            env: Environment variables of every actor's process.
            logs: Folder of the log files; None keeps Ray's own.

        Raises:
            UserError: A constructor raised it.
            ActorFailed: A constructor raised something else, or its process died.
            ActorTimeout: Not all were up in time.
        """
        import ray

        remote = ray.remote(hosted(actor_class))
        files = [None if logs is None else str(logs.absolute() / f"{name}-{r}.log") for r in range(len(arguments))]
        actors = []
        for rank, kwargs in enumerate(arguments):
            options = {"num_cpus": 0} if placement is None else placement.slots[rank].options()
            runtime = {"env_vars": env} if env else None
            actors.append(
                remote.options(**options, runtime_env=runtime).remote(Seat(name, rank, files[rank]), (), kwargs)
            )
        group = cls(name, actors, placement)
        group.logs = files
        group.where = group.call_all("seated", timeout=timeout)
        return group

    def __len__(self) -> int:
        return len(self.actors)

    def submit(self, rank: int, method: str, *args: Any, **kwargs: Any) -> Call:
        """Starts one call; `gather` waits for it."""
        ref = getattr(self.actors[rank], method).remote(*args, **kwargs)
        return Call(f"{self.name}-{rank}", rank, method, ref, self.logs[rank])

    def submit_all(self, method: str, *args: Any, per_rank: Sequence[tuple[Any, ...]] | None = None) -> list[Call]:
        """Starts one call at every actor, with the same arguments or with `per_rank[rank]`."""
        return [self.submit(rank, method, *(args if per_rank is None else per_rank[rank])) for rank in range(len(self))]

    def call_all(
        self, method: str, *args: Any, per_rank: Sequence[tuple[Any, ...]] | None = None, timeout: float
    ) -> list[Any]:
        """Calls every actor and returns their answers by rank. On a failure the whole group is ended first.

        Raises:
            UserError: An actor raised it.
            ActorFailed: An actor died or raised something else; the first cause.
            ActorTimeout: Some did not answer within `timeout` seconds.
        """
        return self._bounded(self.submit_all(method, *args, per_rank=per_rank), timeout)

    def call_one(self, rank: int, method: str, *args: Any, timeout: float, **kwargs: Any) -> Any:
        """Calls one actor; errors as `call_all`."""
        return self._bounded([self.submit(rank, method, *args, **kwargs)], timeout)[0]

    def _bounded(self, calls: list[Call], timeout: float) -> list[Any]:
        try:
            return gather(calls, timeout)
        except BaseException:
            # The others may be waiting in a collective for the one that failed.
            self.shutdown()
            raise

    def shutdown(self) -> None:
        """Ends this group's actors and their child processes, and no others. Returns when they are gone."""
        import ray

        if self._ended or not ray.is_initialized():
            return
        self._ended = True
        for actor in self.actors:
            ray.kill(actor, no_restart=True)
        here = [w.pid for w in self.where if w.machine == machine()]
        deadline = time.monotonic() + END_S
        while (left := [pid for pid in here if guard.members(pid)]) and time.monotonic() < deadline:
            time.sleep(0.02)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, 9)
        if self.placement is not None:
            self.placement.release()


def gather(calls: Sequence[Call], timeout: float) -> list[Any]:
    """Waits for calls, of one group or of several, and returns their answers in order.

    Raises:
        UserError: An actor raised it.
        ActorFailed: The first cause: an actor that died goes before those that raised, and those by time.
        ActorTimeout: Some did not answer within `timeout` seconds.
    """
    import ray

    by_ref = {call.ref: call for call in calls}
    answers: dict[Any, Any] = {}
    failures: list[tuple[Call, BaseException]] = []
    waiting = list(by_ref)
    deadline = time.monotonic() + timeout
    while waiting and (left := deadline - time.monotonic()) > 0:
        done, waiting = ray.wait(waiting, num_returns=1, timeout=left)
        for ref in done:
            try:
                answers[ref] = ray.get(ref)
            except (ray.exceptions.RayError, UserError) as error:
                if not failures:
                    deadline = min(deadline, time.monotonic() + SETTLE_S)
                failures.append((by_ref[ref], error))
    if failures:
        _raise_first(failures)
    if waiting:
        silent = [by_ref[ref] for ref in waiting]
        raise ActorTimeout([(c.actor, c.rank) for c in silent], silent[0].method, timeout)
    return [answers[call.ref] for call in calls]


def _raise_first(failures: list[tuple[Call, BaseException]]) -> None:
    import ray

    died = [f for f in failures if isinstance(f[1], ray.exceptions.RayActorError)]
    call, error = (died or failures)[0]
    cause = getattr(error, "cause", None) if isinstance(error, ray.exceptions.RayTaskError) else error
    if isinstance(cause, UserError):
        raise cause from None
    cause_text = describe(error) + (f"; its log: {call.log}" if call.log else "")
    raise ActorFailed(call.actor, call.rank, call.method, cause_text, len(failures) - 1) from error


def describe(error: BaseException) -> str:
    """One line of what happened, without Ray's frame around it."""
    import ray

    if isinstance(error, ray.exceptions.RayTaskError):
        cause = error.cause
        return f"{type(cause).__name__}: {_line(str(cause))}" if cause is not None else _line(str(error))
    if isinstance(error, ray.exceptions.RayActorError):
        return "its process died (killed, out of memory, or crashed)"
    return f"{type(error).__name__}: {_line(str(error))}"


def _line(text: str) -> str:
    return next((line.strip() for line in text.strip().splitlines() if line.strip()), "no message")
