"""Rollout workers that crash at any moment, playing trajectories in virtual time."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from random import Random
from types import SimpleNamespace
from typing import Any

import ray.exceptions

from skyrl_mega.cluster.errors import ActorFailed, describe
from skyrl_mega.cluster.fleet import NoServingActor
from skyrl_mega.config.schema import SamplingConfig
from skyrl_mega.engines.base import Facts
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.rollout.workers.client import WorkerClient
from skyrl_mega.rollout.workers.group import Workers
from skyrl_mega.rollout.workers.messages import Cancelled, EngineView, Finished, TrajectoryJob, WorkerEvent
from skyrl_mega.simulation.virtual_time import VirtualLoop
from skyrl_mega.telemetry.timeline import ActivityReport, Timeline
from skyrl_mega.trajectories.by_reference import detach_arrays
from skyrl_mega.trajectories.trajectory import Status, Trajectory

PROMPT = Prompt(0, [], "", {})


@dataclass
class Arrays:
    """A stand-in for an object reference."""

    key: int
    good: bool = False


class Worker:
    """A worker of a session. Each method has a `remote`, like an actor's."""

    def __init__(self, random: Random) -> None:
        self.random, self.alive = random, True
        self.dies_of: set[int] = set()
        """Samples that crash the worker."""
        self.lasts_s = 1.0, 3.0
        """Shortest and longest duration of a trajectory in seconds."""
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.said: asyncio.Queue[WorkerEvent] = asyncio.Queue()
        """Events for the first session."""
        self.queues: dict[str, asyncio.Queue[WorkerEvent]] = {}
        """Session → events for the session."""
        self.engines: list[EngineView] = []
        self.names: list[str] = []
        self.early: set[int] = set()
        """Jobs abandoned before arrival."""
        self.ended = 0
        for name in ("begin", "play", "abandon", "events", "rejoin", "end"):
            setattr(self, name, SimpleNamespace(remote=self._called(getattr(self, f"_{name}"))))
        self.hand_over = SimpleNamespace(options=lambda num_returns: SimpleNamespace(remote=self._handed_over))

    def _called(self, method: Callable[..., Awaitable[Any]]) -> Callable[..., asyncio.Task[Any]]:
        async def call(*args: Any) -> Any:
            await asyncio.sleep(self.random.uniform(0, 0.02))  # calls overtake each other
            if not self.alive:
                raise ray.exceptions.RayActorError
            return await method(*args)

        def remote(*args: Any) -> asyncio.Task[Any]:
            task = asyncio.ensure_future(call(*args))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            return task

        return remote

    def die(self) -> None:
        self.alive = False
        for task in self.tasks.values():
            task.cancel()
        for queue in self.queues.values():
            queue.put_nowait(Cancelled(-1))  # wakes tasks that wait for events

    async def _begin(self, session: str, sampling: object, service: bool, engines: EngineView) -> None:
        self.engines.append(engines)
        self.queues[session] = asyncio.Queue() if self.queues else self.said

    async def _play(self, session: str, jobs: list[TrajectoryJob]) -> None:
        assert session in self.queues
        for job in jobs:
            self.names += job.names or (job.name,)
            if job.key in self.early:
                for key in job.keys:
                    self.queues[session].put_nowait(Cancelled(key))
                continue
            self.tasks[job.key] = asyncio.create_task(self._one(job, self.queues[session]))

    async def _one(self, job: TrajectoryJob, said: asyncio.Queue[WorkerEvent]) -> None:
        try:
            await asyncio.sleep(self.random.uniform(*self.lasts_s))
            if job.sample in self.dies_of and not job.fault:
                self.die()
                return
        except asyncio.CancelledError:
            for key in job.keys:
                said.put_nowait(Cancelled(key))
            return
        nothing: Any = array("i")
        status = Status.ERROR_INFRASTRUCTURE if job.fault else Status.COMPLETED
        for i, key in enumerate(job.keys):
            t = Trajectory(PROMPT, job.sample + i, nothing, nothing, nothing, 0, 1.0, status, 1)
            t.metadata["error"] = job.fault
            said.put_nowait(Finished(key, detach_arrays(t)[0], ()))

    def _handed_over(self, session: str, keys: list[int]) -> list[Any]:
        """Returns references to arrays, valid once the last part of the answer arrives without an error."""
        refs = [Arrays(key) for key in keys]

        async def kept() -> None:
            await asyncio.sleep(self.random.uniform(0, 0.3))  # storing takes time
            if not self.alive:
                raise ray.exceptions.RayActorError
            for ref in refs:
                ref.good = True

        return [*refs, self._called(kept)()]

    async def _abandon(self, session: str, keys: list[int]) -> None:
        for key in keys:
            if key in self.tasks:
                self.tasks[key].cancel()
            else:
                self.early.add(key)

    async def _events(self, session: str) -> list[WorkerEvent]:
        assert session in self.queues
        said = self.queues[session]
        events = [await said.get()]
        if not self.alive:
            raise ray.exceptions.RayActorError
        while not said.empty():
            events.append(said.get_nowait())
        return events

    async def _rejoin(self, session: str, engines: EngineView) -> None:
        self.engines.append(engines)

    async def _end(self, session: str) -> ActivityReport:
        self.ended += 1
        return Timeline().take()


class Group:
    """The parts of an `ActorGroup` needed by workers."""

    def __init__(self, count: int, random: Random) -> None:
        self.name, self.random = "rollout", random
        self.dies_of: set[int] = set()
        self.lasts_s = 1.0, 3.0
        self.actors = [Worker(random) for _ in range(count)]
        self.every = [*self.actors]
        self.starts_fail = 0
        """Number of upcoming starts that fail."""
        self.logs = [f"rollout-{i}.log" for i in range(count)]

    def __len__(self) -> int:
        return len(self.actors)

    def each(self, **settings: Any) -> None:
        """Sets attributes of every worker, also of workers that start later."""
        for name, value in settings.items():
            for one in (self, *self.actors):
                setattr(one, name, value)

    def end(self, rank: int) -> None:
        self.actors[rank].alive = False

    def replace(self, rank: int, timeout: float) -> None:
        if self.starts_fail:
            self.starts_fail -= 1
            raise ActorFailed("rollout", rank, "construct", "it did not start")
        self.actors[rank] = Worker(self.random)
        self.actors[rank].dies_of, self.actors[rank].lasts_s = self.dies_of, self.lasts_s
        self.every.append(self.actors[rank])


class InVirtualTime(Executor):
    """An executor with tasks in the loop's time instead of a thread."""

    def __init__(self, random: Random) -> None:
        self.random = random

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Runs the call after a random delay."""
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except ActorFailed as error:
                future.set_exception(error)

        asyncio.get_running_loop().call_later(self.random.uniform(0.5, 2.0), run)
        return future


class Engines:
    """The parts of a `Fleet` needed by a player."""

    def __init__(self) -> None:
        self.group = SimpleNamespace(name="engine", actors=["e0", "e1"])
        self.facts = [Facts(cache_tokens=1000, cache_bytes=1), None]
        self.serving = [0, 1]
        self.left: list[int] = []
        self.restarts = 1

    def retire(self, rank: int, error: BaseException | str) -> None:
        if not self.restarts:
            raise ActorFailed("engine", 1, "service", describe(error))
        self.restarts -= 1
        self.serving.remove(rank)

    def check(self) -> None:
        if not self.serving:
            raise NoServingActor("engine", 0, "service", "all are dead")


@contextmanager
def players(
    count: int, restarts: int, seed: int = 0
) -> Iterator[tuple[WorkerClient, Group, Workers, Engines, list[str]]]:
    """Yields a client with this number of workers, all of its parts, and the lines that it says; then closes client and
    workers."""
    group, engines, lines = Group(count, Random(seed)), Engines(), list[str]()
    any_group: Any = group
    any_engines: Any = engines
    workers = Workers(any_group, restarts=restarts, start_timeout_s=1.0, say=lines.append)
    workers._threads.shutdown()
    untyped_workers: Any = workers
    untyped_workers._threads = InVirtualTime(group.random)
    player = WorkerClient(workers, any_engines, SamplingConfig(), service=True, spans=lambda: None)
    yield player, group, workers, engines, lines
    player.close()
    workers.close()


def in_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Returns a test that runs an async test in virtual time."""

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        with VirtualLoop() as loop:
            loop.run(test(*args, **kwargs))

    return run
