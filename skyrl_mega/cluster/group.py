"""Groups of Ray actors: calls with a time limit, failures with a root cause, and no processes left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from skyrl_mega.cluster import reaper
from skyrl_mega.cluster.actor_process import ActorIdentity, Location, hosted, machine
from skyrl_mega.cluster.errors import ActorFailed, ActorTimeout, ClusterError, NodeGone
from skyrl_mega.cluster.placement import Placement, Slot, by_gpu
from skyrl_mega.common.errors import UserError

SETTLE_S = 2.0
"""Seconds to keep collecting errors after the first: peers of a dead actor complain before Ray reports the death."""
END_S = 10.0
"""Seconds until the processes of killed actors must be gone."""


NOWHERE = Location("", 0, "", "", ())
"""Location of an actor that does not run yet."""
Waiting = Callable[[Sequence[str]], None]
"""Receives the names of the actors that a call still waits for."""


@dataclass(frozen=True)
class PendingCall:
    """A started call to an actor, with the reference to its answer."""

    group: str
    """Name of the actor's group."""
    rank: int
    """The actor's rank in the group."""
    method: str
    """Name of the called method."""
    ref: Any
    """Ray's reference to the answer."""
    log: str | None = None
    """The actor's log file, for errors; None without one."""

    @property
    def actor(self) -> str:
        """The actor's name, such as `policy-3`."""
        return f"{self.group}-{self.rank}"


@dataclass(frozen=True)
class ActorSpec:
    """Everything needed to start an actor, and later a replacement."""

    actor_class: type
    """A plain class; `async def` methods make the actor concurrent."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the constructor."""
    slot: Slot | None = None
    """Place of the actor; None leaves the choice to Ray."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the actor's process."""


class ActorGroup:
    """Actors by rank; `spawn` starts a group. A rank is never reused: an actor added later gets the next rank."""

    def __init__(self, name: str, actors: list[Any], placement: Placement | None = None) -> None:
        self.name, self.actors, self.placement = name, actors, placement
        self.logs: list[str | None] = [None] * len(actors)
        self.where: list[Location] = []
        self._folder: Path | None = None
        self._specs: list[ActorSpec] = []
        self._classes: dict[type, Any] = {}
        """Actor class → Ray's class, exported once."""
        self._ended = False
        self._ended_ranks: set[int] = set()
        """Ranks without processes to end: not known yet, or ended, and another program may reuse the process ids."""
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
        waiting: Waiting | None = None,
    ) -> ActorGroup:
        """Starts an actor per entry of `arguments` and waits until all are up. On a failure the actors are ended and
        `placement` is released first.

        Args:
            name: Name of the group in errors and log files: `<logs>/<name>-<rank>.log`.
            actor_class: A plain class; `async def` methods make the actors concurrent.
            arguments: Keyword arguments of the constructor, by rank.
            timeout: Seconds until the last constructor must return.
            placement: Reserved slots, released when the group ends. Ranks take the slots in order, or in the order of
                `placement.by_gpu` if Ray assigned GPUs. None leaves the choice to Ray.
            env: Environment variables of every actor process.
            logs: Folder of the log files; None keeps Ray's log files.
            waiting: Receives the names of the actors that are not up, again and again during the wait; None: nothing is
                called.

        Raises:
            UserError: A constructor raised it.
            ActorFailed: A constructor raised another error, or a process died.
            ActorTimeout: Some actors were not up within `timeout` seconds.
        """
        until = time.monotonic() + timeout
        slots: list[Slot | None] = [None] * len(arguments) if placement is None else [*placement.slots]
        group = cls(name, [], placement)
        group._folder = logs
        group.actors = [group._start(ActorSpec(actor_class, {}, slot, env or {})) for slot in slots]
        group.logs = [group._log(rank) for rank in range(len(slots))]
        locations = group.call_all("location", timeout=timeout, waiting=waiting)
        order = by_gpu(locations)
        group.actors = [group.actors[i] for i in order]
        group.where = [locations[i] for i in order]
        group._specs = [
            ActorSpec(actor_class, kwargs, slots[i], env or {}) for i, kwargs in zip(order, arguments, strict=True)
        ]
        left = max(0.0, until - time.monotonic())
        group.call_all(
            "construct", per_rank=[*map(group._construction, range(len(order)))], timeout=left, waiting=waiting
        )
        return group

    def add(self, spec: ActorSpec) -> int:
        """Starts a further actor without waiting, and returns the new rank. `bring_up` must follow.

        Raises:
            ClusterError: The group has been shut down.
        """
        with self._lock:
            rank = len(self.actors)
            self._refuse_if_ended(rank)
            self._specs.append(spec)
            self.logs.append(self._log(rank))
            self.where.append(NOWHERE)
            self._ended_ranks.add(rank)
            self.actors.append(self._start(spec))
        return rank

    def bring_up(self, rank: int, timeout: float) -> None:
        """Waits until an added actor's process runs, and constructs the actor. After an error the actor may still run;
        `end` ends it.

        Args:
            rank: The actor's rank.
            timeout: Seconds until the constructor must return.

        Raises:
            UserError: The constructor raised it.
            ActorFailed: The constructor raised another error, or the actor died.
            ActorTimeout: The actor was not up within `timeout` seconds.
        """
        until = time.monotonic() + timeout
        self.where[rank] = gather([self.submit(rank, "location")], timeout)[0]
        self._ended_ranks.discard(rank)
        gather([self.submit(rank, "construct", *self._construction(rank))], max(0.0, until - time.monotonic()))

    def extend(self, specs: Sequence[ActorSpec], *, timeout: float) -> None:
        """Adds actors of any class, and waits until all are up. On a failure the whole group is ended first. For the
        errors see `bring_up`.

        Args:
            specs: The actors, in the order of the new ranks.
            timeout: Seconds until the last constructor must return.
        """
        until = time.monotonic() + timeout
        ranks = [self.add(spec) for spec in specs]
        try:
            for rank in ranks:
                self.bring_up(rank, max(0.0, until - time.monotonic()))
        except BaseException:
            self.shutdown()
            raise

    def _start(self, spec: ActorSpec) -> Any:
        import ray

        if spec.actor_class not in self._classes:
            self._classes[spec.actor_class] = ray.remote(hosted(spec.actor_class))
        options = {"num_cpus": 0} if spec.slot is None else spec.slot.options()
        variables = {**spec.env, **(spec.slot.env if spec.slot else {})}
        environment = {"env_vars": variables} if variables else None
        return self._classes[spec.actor_class].options(**options, runtime_env=environment).remote()

    def _log(self, rank: int) -> str | None:
        return None if self._folder is None else str(self._folder.absolute() / f"{self.name}-{rank}.log")

    def _construction(self, rank: int) -> tuple[ActorIdentity, dict[str, Any]]:
        """Returns the arguments of the actor's method `construct`."""
        return ActorIdentity(self.name, rank, self.logs[rank]), dict(self._specs[rank].arguments)

    def _refuse_if_ended(self, rank: int) -> None:
        if self._ended:
            raise ClusterError(f"{self.name}-{rank} is not started: its group has been shut down")

    def __len__(self) -> int:
        return len(self.actors)

    @property
    def ranks_by_node(self) -> str:
        """Text for the user: the ranks on each node, such as `10.0.0.1: 0-7, 10.0.0.2: 8-15`."""
        runs: list[tuple[str, int, int]] = []
        for rank, location in enumerate(self.where):
            if runs and runs[-1][0] == location.address:
                runs[-1] = (location.address, runs[-1][1], rank)
            else:
                runs.append((location.address, rank, rank))
        return ", ".join(f"{node}: {first}" + (f"-{last}" if last > first else "") for node, first, last in runs)

    def submit(self, rank: int, method: str, *args: Any, **kwargs: Any) -> PendingCall:
        """Starts a call of `method` at the actor of this rank without waiting; `gather` or `settle` waits for the
        answer."""
        ref = getattr(self.actors[rank], method).remote(*args, **kwargs)
        return PendingCall(self.name, rank, method, ref, self.logs[rank])

    def submit_all(
        self, method: str, *args: Any, per_rank: Sequence[tuple[Any, ...]] | None = None
    ) -> list[PendingCall]:
        """Starts a call of `method` at every actor without waiting and returns the calls by rank. The arguments are
        `args` for all actors, or `per_rank[rank]` if `per_rank` is set."""
        return [self.submit(rank, method, *(args if per_rank is None else per_rank[rank])) for rank in range(len(self))]

    def call_all(
        self,
        method: str,
        *args: Any,
        per_rank: Sequence[tuple[Any, ...]] | None = None,
        timeout: float,
        waiting: Waiting | None = None,
    ) -> list[Any]:
        """Calls every actor and returns the answers by rank. On a failure the whole group is ended first.

        Args:
            method: Name of the method.
            args: Arguments of the method, the same for all actors.
            per_rank: Arguments of each rank, in place of `args`; None uses `args`.
            timeout: Time limit in seconds.
            waiting: Receives the names of the actors without an answer, at first and after every answer.

        Raises:
            UserError: An actor raised it.
            ActorFailed: An actor died or raised another error; names the root cause.
            ActorTimeout: Some actors did not answer within `timeout` seconds.
        """
        return self._bounded(self.submit_all(method, *args, per_rank=per_rank), timeout, waiting)

    def call_one(self, rank: int, method: str, *args: Any, timeout: float, **kwargs: Any) -> Any:
        """Calls an actor and returns the answer. On a failure the whole group is ended first.

        Args:
            rank: The actor's rank.
            method: Name of the method.
            args, kwargs: Arguments of the method.
            timeout: Time limit in seconds.

        Raises:
            UserError: The actor raised it.
            ActorFailed: The actor died or raised another error.
            ActorTimeout: The actor did not answer within `timeout` seconds.
        """
        return self._bounded([self.submit(rank, method, *args, **kwargs)], timeout)[0]

    def _bounded(self, calls: list[PendingCall], timeout: float, waiting: Waiting | None = None) -> list[Any]:
        try:
            return gather(calls, timeout, waiting)
        except BaseException:
            # Other actors may be waiting in a collective for the failed actor.
            self.shutdown()
            raise

    def end(self, rank: int) -> None:
        """Kills the actor of this rank and all its child processes, and waits until they are gone. The actor need not
        respond. Starts no replacement. Returns after at most twice `END_S` seconds."""
        import ray

        ray.kill(self.actors[rank], no_restart=True)
        if rank not in self._ended_ranks:
            end_processes(self.where[rank])
            self._ended_ranks.add(rank)

    def replace(self, rank: int, timeout: float) -> None:
        """Kills the actor of this rank with all child processes, starts a replacement with the same arguments and waits
        until it is up.

        The old actor may be dead or stopped. The replacement appends to the same log file. After an error the
        replacement may still run; `end` ends it.

        Args:
            rank: The actor's rank.
            timeout: Seconds until the replacement's constructor must return.

        Raises:
            ClusterError: The group has been shut down.
            UserError: The constructor raised it.
            ActorFailed: The constructor raised another error, or the replacement died.
            ActorTimeout: The replacement was not up within `timeout` seconds.
        """
        self.end(rank)
        with self._lock:
            self._refuse_if_ended(rank)
            self.actors[rank] = self._start(self._specs[rank])
        self.bring_up(rank, timeout)

    def shutdown(self) -> None:
        """Kills the actors of this group and all child processes, and releases the reserved places. Returns when the
        processes of this machine are gone, after at most `END_S` seconds; does not wait for other nodes. Does nothing
        the second time, or after Ray's end."""
        import ray

        with self._lock:
            if self._ended or not ray.is_initialized():
                return
            self._ended = True
        for actor in self.actors:
            ray.kill(actor, no_restart=True)
        local_pids = [w.pid for i, w in enumerate(self.where) if i not in self._ended_ranks and w.machine == machine()]
        _wait_gone(local_pids, END_S)
        if self.placement is not None:
            self.placement.release()


def end_processes(location: Location) -> None:
    """Kills the process group of an actor, on any node. Returns when all processes are gone, or after at most twice
    `END_S` seconds. A lost node is no error."""
    import ray

    if location.machine == machine():
        _end_group(location.pid)
        return
    remote = ray.remote(num_cpus=0, resources={f"node:{location.address}": 0.001})(_end_group)
    with contextlib.suppress(ray.exceptions.RayError):  # a lost node runs no processes
        ray.get(remote.remote(location.pid), timeout=2 * END_S)


def _end_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    _wait_gone([pid], END_S)


def _wait_gone(groups: list[int], seconds: float) -> None:
    """Waits until process groups are empty; after `seconds`, kills the remaining processes."""
    deadline = time.monotonic() + seconds
    while (alive := [pid for pid in groups if reaper.members(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in alive:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


@dataclass(frozen=True)
class Outcomes:
    """Answers, failures and missing answers of a set of calls."""

    timeout: float
    """Time limit of the calls in seconds."""
    answers: dict[PendingCall, Any]
    """Return values of the calls that succeeded."""
    failures: list[tuple[PendingCall, BaseException]]
    """Failed calls and errors, in order of arrival."""
    silent: list[PendingCall]
    """Calls without an answer at the deadline."""

    @property
    def causes(self) -> dict[int, str]:
        """Rank → cause of every call that failed or has no answer, for calls to a single group."""
        silent = {call.rank: f"no answer within {self.timeout:g} s" for call in self.silent}
        return {call.rank: describe(error) for call, error in self.failures} | silent

    def raise_first(self) -> NoReturn:
        """Raises the root cause: the first actor death, else the first error, else the timeout. To be called only if
        `failures` or `silent` is not empty.

        Raises:
            UserError: The error, if the actor raised a UserError.
            ActorFailed: The actor died or raised another error.
            NodeGone: The intended node of the actor no longer exists.
            ActorTimeout: Nothing failed, and some calls are unanswered.
        """
        import ray

        if not self.failures:
            first = self.silent[0]
            raise ActorTimeout([(call.group, call.rank) for call in self.silent], first.method, self.timeout)
        death_errors = (ray.exceptions.RayActorError, ray.exceptions.ActorUnschedulableError)
        died = [f for f in self.failures if isinstance(f[1], death_errors)]
        call, error = (died or self.failures)[0]
        if isinstance(cause := cause_of(error), UserError):
            raise cause from None
        kind = NodeGone if isinstance(error, ray.exceptions.ActorUnschedulableError) else ActorFailed
        others = len(self.failures) - 1
        raise kind(call.group, call.rank, call.method, describe(error), others=others, log=call.log) from error


def settle(
    calls: Sequence[PendingCall],
    timeout: float,
    after_failure: float,
    failed: Callable[[BaseException], None] | None = None,
    waiting_for: Waiting | None = None,
) -> Outcomes:
    """Waits for calls to any number of groups and collects answers and failures instead of raising.

    Args:
        calls: The calls, possibly of several groups.
        timeout: Time limit in seconds.
        after_failure: Seconds to keep waiting for the other calls after the first failure.
        failed: Called with the first failure, to notify waiting peers of the failed actor. None calls nothing.
        waiting_for: Receives the names of the actors without an answer, at first and after every answer.
    """
    import ray

    by_ref = {call.ref: call for call in calls}
    outcomes = Outcomes(timeout, {}, [], [])
    waiting = list(by_ref)
    deadline = time.monotonic() + timeout
    while waiting and (remaining := deadline - time.monotonic()) > 0:
        if waiting_for is not None:
            waiting_for([by_ref[ref].actor for ref in waiting])
        done, waiting = ray.wait(waiting, num_returns=1, timeout=remaining)
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


def gather(calls: Sequence[PendingCall], timeout: float, waiting_for: Waiting | None = None) -> list[Any]:
    """Waits for calls to any number of groups and returns the answers in order. Ends no actor, also after a failure.

    Args:
        calls: The calls.
        timeout: Time limit in seconds; after a first failure, at most `SETTLE_S` more.
        waiting_for: Receives the names of the actors without an answer, at first and after every answer.

    Raises:
        UserError: An actor raised it.
        ActorFailed: The root cause: the first actor death, or without any death the first error.
        ActorTimeout: No call failed, but some actors did not answer within `timeout` seconds.
    """
    outcomes = settle(calls, timeout, SETTLE_S, waiting_for=waiting_for)
    if outcomes.failures or outcomes.silent:
        outcomes.raise_first()
    return [outcomes.answers[call] for call in calls]


def cause_of(error: BaseException) -> BaseException:
    """Returns the exception that an actor's method raised, taken out of Ray's wrapper. Any other error, such as the
    death of an actor, is returned itself."""
    import ray

    cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else None
    return error if cause is None else cause


def describe(error: BaseException) -> str:
    """Returns a single line about an error: class name and first line of its text. For an error from an actor, these
    are of the exception raised there; for a dead actor the line says if its node or its process died."""
    import ray

    if isinstance(error, ray.exceptions.RayTaskError):
        cause = error.cause
        return f"{type(cause).__name__}: {_line(str(cause))}" if cause is not None else _line(str(error))
    if isinstance(error, ray.exceptions.ActorUnschedulableError):
        return "its node died"
    if isinstance(error, ray.exceptions.RayActorError):
        if "node has died" in str(error):  # Ray has no exception class for this
            return "its node died"
        return "its process died (killed, out of memory, or crashed)"
    return f"{type(error).__name__}: {_line(str(error))}"


def _line(text: str) -> str:
    return next((line.strip() for line in text.strip().splitlines() if line.strip()), "no message")
