"""Groups of Ray actors, and no processes left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skyrl_mega.cluster import reaper
from skyrl_mega.cluster.actor_process import ActorIdentity, Location, hosted, machine
from skyrl_mega.cluster.calls import PendingCall, Waiting, gather
from skyrl_mega.cluster.errors import ClusterError
from skyrl_mega.cluster.placement import Placement, Slot, by_gpu

END_S = 10.0
"""Seconds until the processes of killed actors must be gone."""


NOWHERE = Location("", 0, "", "", ())
"""Location of an actor that does not run yet."""


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
    """Actors by rank; `spawn` starts a group. A rank is never reused: an actor added later gets the next rank.

    Args:
        name: Name of the group, in errors and logs.
        actors: Ray's handles of the actors, by rank.
        placement: Reserved places of the actors; None without.
    """

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
        """Starts a further actor without waiting, and returns the new rank. `bring_up` must follow. `spec` defines the
        actor.

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
        """Adds actors of any class, and waits until all are up. On a failure of a started actor the whole group is
        ended first.

        Args:
            specs: The actors, in the order of the new ranks.
            timeout: Seconds until the last constructor must return.

        Raises:
            ClusterError: The group has been shut down.
            UserError: A constructor raised it.
            ActorFailed: A constructor raised another error, or an actor died.
            ActorTimeout: Some actor was not up within `timeout` seconds.
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
            UserError: The root cause (see `gather`), if an actor raised a UserError.
            ActorFailed: Any other root cause: an actor died or raised another error.
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
    `END_S` seconds. A lost node is not an error."""
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
