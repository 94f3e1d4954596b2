"""Groups of actors: every call bounded, the root cause of a failure named, nothing left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from skyrl_mega.cluster import reaper
from skyrl_mega.cluster.actor_process import ActorPlace, Location, hosted, machine
from skyrl_mega.cluster.errors import ActorFailed, ActorTimeout, ClusterError, NodeGone
from skyrl_mega.cluster.last_words import with_cause
from skyrl_mega.cluster.placement import Placement, Slot, by_gpu
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
        self.where: list[Location] = []
        self._start: Callable[[int], Any] | None = None
        self._places: list[tuple[ActorPlace, dict[str, Any]]] = []
        self._ended = False
        self._down: set[int] = set()
        """Whose processes have been ended: another program may have their numbers by now."""
        self._lock = threading.Lock()

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
            placement: Reserved slots; the group releases them at its end. Ranks take them in order, and where Ray has
                dealt out GPUs in the order of `placement.by_gpu`. None leaves the choice to Ray.
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

        def start(slot: Slot | None) -> Any:
            options = {"num_cpus": 0} if slot is None else slot.options()
            variables = (env or {}) | (slot.env if slot else {})
            return remote.options(**options, runtime_env={"env_vars": variables} if variables else None).remote()

        until = time.monotonic() + timeout
        slots: list[Slot | None] = [None] * len(arguments) if placement is None else [*placement.slots]
        group = cls(name, [start(slot) for slot in slots], placement)
        group.logs = files
        where = group.call_all("location", timeout=timeout)
        order = by_gpu(where)
        slots, group.actors = [slots[i] for i in order], [group.actors[i] for i in order]
        group.where = [where[i] for i in order]
        group._start = lambda rank: start(slots[rank])
        group._places = [(ActorPlace(name, rank, files[rank]), given) for rank, given in enumerate(arguments)]
        group.call_all("construct", per_rank=group._places, timeout=max(0.0, until - time.monotonic()))
        return group

    def __len__(self) -> int:
        return len(self.actors)

    @property
    def seating(self) -> str:
        """For people: which ranks sit on which node, `10.0.0.1: 0-7, 10.0.0.2: 8-15`."""
        runs: list[tuple[str, int, int]] = []
        for rank, where in enumerate(self.where):
            if runs and runs[-1][0] == where.address:
                runs[-1] = (where.address, runs[-1][1], rank)
            else:
                runs.append((where.address, rank, rank))
        return ", ".join(f"{node}: {first}" + (f"-{last}" if last > first else "") for node, first, last in runs)

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
            ActorFailed: An actor died or raised something else; the root cause.
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

    def end(self, rank: int) -> None:
        """Ends one actor with its child processes. It need not answer."""
        import ray

        ray.kill(self.actors[rank], no_restart=True)
        if rank not in self._down:
            end_processes(self.where[rank])
            self._down.add(rank)

    def replace(self, rank: int, timeout: float) -> None:
        """Ends one actor with its child processes and starts another in its place, with the same arguments.

        The old one need not answer: it may be dead, or stopped. Its log goes on in the same file.

        Raises:
            UserError, ActorFailed, ActorTimeout: The new one did not come up; as `spawn`.
        """
        assert self._start is not None
        self.end(rank)
        with self._lock:
            if self._ended:
                raise ClusterError(f"{self.name}-{rank} is not started again: its group has been ended")
            self.actors[rank] = self._start(rank)
        until = time.monotonic() + timeout
        self.where[rank] = gather([self.submit(rank, "location")], timeout)[0]
        self._down.discard(rank)
        gather([self.submit(rank, "construct", *self._places[rank])], max(0.0, until - time.monotonic()))

    def shutdown(self) -> None:
        """Ends this group's actors and their child processes, and no others. Returns when they are gone."""
        import ray

        with self._lock:
            if self._ended or not ray.is_initialized():
                return
            self._ended = True
        for actor in self.actors:
            ray.kill(actor, no_restart=True)
        here = [w.pid for i, w in enumerate(self.where) if i not in self._down and w.machine == machine()]
        _wait_gone(here, END_S)
        if self.placement is not None:
            self.placement.release()


def end_processes(where: Location) -> None:
    """Ends an actor's process and its children, stopped ones too, on whatever node they are. Returns when all are
    gone."""
    import ray

    if where.machine == machine():
        _end_group(where.pid)
        return
    there = ray.remote(num_cpus=0, resources={f"node:{where.address}": 0.001})(_end_group)
    with contextlib.suppress(ray.exceptions.RayError):  # a node that is gone has no processes
        ray.get(there.remote(where.pid), timeout=2 * END_S)


def _end_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    _wait_gone([pid], END_S)


def _wait_gone(groups: list[int], seconds: float) -> None:
    """Waits until process groups are empty; kills what is left after so many seconds."""
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in groups if reaper.members(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


@dataclass(frozen=True)
class Outcomes:
    """What became of calls."""

    timeout: float
    """Seconds that they were given."""
    answers: dict[Call, Any]
    failures: list[tuple[Call, BaseException]]
    """In the order in which they came in."""
    silent: list[Call]
    """Calls that were not answered in time."""

    def raise_first(self) -> NoReturn:
        """Raises the root cause: an actor that died goes before those that raised, and those by time."""
        import ray

        if not self.failures:
            first = self.silent[0]
            raise ActorTimeout([(c.actor, c.rank) for c in self.silent], first.method, self.timeout)
        gone = (ray.exceptions.RayActorError, ray.exceptions.ActorUnschedulableError)
        died = [f for f in self.failures if isinstance(f[1], gone)]
        call, error = (died or self.failures)[0]
        if isinstance(cause := cause_of(error), UserError):
            raise cause from None
        text = with_cause(describe(error), call.log) + (f"; its log: {call.log}" if call.log else "")
        kind = NodeGone if isinstance(error, ray.exceptions.ActorUnschedulableError) else ActorFailed
        raise kind(call.actor, call.rank, call.method, text, len(self.failures) - 1) from error


def settle(
    calls: Sequence[Call], timeout: float, after_failure: float, failed: Callable[[BaseException], None] | None = None
) -> Outcomes:
    """Waits for calls, of one group or of several, whatever becomes of them.

    Args:
        timeout: Seconds at most.
        after_failure: Once one has failed the others are listened to for so many seconds at most.
        failed: Called at the first failure, to tell those who wait for the one that failed.
    """
    import ray

    by_ref = {call.ref: call for call in calls}
    outcomes = Outcomes(timeout, {}, [], [])
    waiting = list(by_ref)
    deadline = time.monotonic() + timeout
    while waiting and (left := deadline - time.monotonic()) > 0:
        done, waiting = ray.wait(waiting, num_returns=1, timeout=left)
        for ref in done:
            try:
                outcomes.answers[by_ref[ref]] = ray.get(ref)
            except (ray.exceptions.RayError, UserError) as error:
                if not outcomes.failures:
                    deadline = min(deadline, time.monotonic() + after_failure)
                    if failed is not None:
                        failed(error)
                outcomes.failures.append((by_ref[ref], error))
    outcomes.silent.extend(by_ref[ref] for ref in waiting)
    return outcomes


def gather(calls: Sequence[Call], timeout: float) -> list[Any]:
    """Waits for calls, of one group or of several, and returns their answers in order.

    Raises:
        UserError: An actor raised it.
        ActorFailed: The root cause: an actor that died goes before those that raised, and those by time.
        ActorTimeout: Some did not answer within `timeout` seconds.
    """
    outcomes = settle(calls, timeout, SETTLE_S)
    if outcomes.failures or outcomes.silent:
        outcomes.raise_first()
    return [outcomes.answers[call] for call in calls]


def cause_of(error: BaseException) -> BaseException:
    """What was raised in the actor, where Ray brings it along; else Ray's own error."""
    import ray

    cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else None
    return error if cause is None else cause


def describe(error: BaseException) -> str:
    """One line of what happened, without Ray's frame around it."""
    import ray

    if isinstance(error, ray.exceptions.RayTaskError):
        cause = error.cause
        return f"{type(cause).__name__}: {_line(str(cause))}" if cause is not None else _line(str(error))
    if isinstance(error, ray.exceptions.ActorUnschedulableError):
        return "its node died"
    if isinstance(error, ray.exceptions.RayActorError):
        if "node has died" in str(error):  # Ray has no class for it
            return "its node died"
        return "its process died (killed, out of memory, or crashed)"
    return f"{type(error).__name__}: {_line(str(error))}"


def _line(text: str) -> str:
    return next((line.strip() for line in text.strip().splitlines() if line.strip()), "no message")
