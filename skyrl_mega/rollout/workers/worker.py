"""The rollout worker: a process that runs environments, the agent loop and the requests to engines for the driver.

The driver sends jobs and polls for events, many of either in a message. A session is a phase, or a service across
weight syncs; each session uses a separate router, as in the driver.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any

from skyrl_mega.cluster.errors import ActorFailed, describe
from skyrl_mega.cluster.fleet import NoServingActor
from skyrl_mega.config.schema import EnvironmentConfig, RolloutConfig, SamplingConfig
from skyrl_mega.envs import registry
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.envs.sandbox import budget
from skyrl_mega.rollout import journal
from skyrl_mega.rollout.agent.agent_factory import AgentFactory
from skyrl_mega.rollout.agent.env_pool import EnvPool
from skyrl_mega.rollout.agent.renderer import Renderer
from skyrl_mega.rollout.generators import TrajectoryGenerator, load
from skyrl_mega.rollout.generators.group_player import GroupPlayer
from skyrl_mega.rollout.workers.messages import (
    Cancelled,
    EngineAwaitsSync,
    EngineDead,
    EngineView,
    Finished,
    KilledForMemory,
    RolloutFailed,
    TimelineCounts,
    TrajectoryJob,
    WorkerEvent,
)
from skyrl_mega.telemetry.timeline import ActivityReport, Timeline
from skyrl_mega.telemetry.trace import Span
from skyrl_mega.trajectories.by_reference import detach_arrays
from skyrl_mega.trajectories.remote_arrays import StoredTrajectory

HEARTBEAT_S = 1.0
"""Seconds after which a worker without events reports counts as a sign of life."""
COUNTS_S = 0.5
"""Least seconds between two `TimelineCounts`."""
COALESCE_S = 0.02
"""Seconds to wait for further events, sent in the same message."""
DRIVER_PROMPT = Prompt(-1, [], "", {})
"""Placeholder for a prompt known to the driver."""


class RolloutWorker:
    """A process that runs trajectories.

    Args:
        model: Directory of the model, for the tokenizer and the chat template.
        rollout: Settings of the run; `concurrency` is this worker's share.
        environments: Settings of the run; `workers` is this worker's share.
        reward_weights: `algorithm.reward_weights`.
        secrets: Variables of the driver's environment read by environments.
        workers_on_node: Number of workers sharing this node's memory.
    """

    def __init__(
        self,
        *,
        model: str,
        rollout: RolloutConfig,
        environments: EnvironmentConfig,
        reward_weights: Mapping[str, float],
        secrets: Mapping[str, str],
        workers_on_node: int,
    ) -> None:
        os.environ |= secrets
        budget.divide(workers_on_node)
        for name in (*environments.classes, *filter(None, [environments.default_name])):
            registry.resolve(name, environments)  # import now, so that no trajectory's time includes it
        self.timeline, self.counts_sent_at = Timeline(), time.monotonic()
        chat, threads = Renderer(model, rollout), EnvPool(environments.workers, self.timeline.calls)
        self.factory = AgentFactory(chat, rollout, environments, reward_weights, threads)
        self.generator = load.create(rollout)
        self.sessions: dict[str, PhaseSession] = {}
        self.reported_kills = 0
        """Programs killed for memory, as last reported to the driver."""
        self.sandboxes_reported = False
        """True once the driver knows that this worker runs sandboxes."""

    async def begin(self, session: str, sampling: SamplingConfig, service: bool, engines: EngineView) -> None:
        """Begins a session: a generation phase, or a service for the whole run.

        Args:
            session: Unique name of the session, used in all later calls.
            sampling: Sampling parameters.
            service: True for a service: requests without an engine wait instead of failing.
            engines: The driver's view of the engines.
        """
        new_session = self.sessions[session] = PhaseSession(self.factory, sampling, service, engines, self.generator)
        new_session.router.count = self.timeline.requests

    async def play(self, session: str, jobs: Sequence[TrajectoryJob]) -> None:
        """Starts the trajectories of these jobs and returns at once; `events` returns an outcome of each: `Finished`,
        `RolloutFailed` or `Cancelled`.

        A job abandoned before its start is reported as `Cancelled`.

        Args:
            session: Name of a session started by `begin`; the session has the sampling settings and the engines.
            jobs: The trajectories to run.

        Raises:
            KeyError: The session has not begun or has ended.
        """
        for job in jobs:
            self.sessions[session].play(job)

    async def abandon(self, session: str, keys: Sequence[int]) -> None:
        """Cancels the jobs with these keys (`TrajectoryJob.key`). Each job still ends with an event: `Cancelled`, or
        another outcome if the job ended first. Keys may arrive before their jobs. Does nothing if the session has not
        begun or has ended."""
        if (known := self.sessions.get(session)) is not None:  # the session may have ended
            for key in keys:
                known.abandon(key)

    async def rejoin(self, session: str, engines: EngineView) -> None:
        """Replaces the session's view of the engines after a weight sync: the serving engines of the view accept
        requests again. Only engines in `serving` get requests. Ignores a view older than the known one.

        Raises:
            KeyError: The session has not begun or has ended.
            ValueError: The view has fewer actors than the known one.
        """
        self.sessions[session].rejoin(engines)

    async def engines_left(self, session: str, ranks: Sequence[int]) -> None:
        """Sends no new requests of a session to these engines, which are leaving the run; their requests finish. Raises
        KeyError after the session's end."""
        self.sessions[session].engines.remove(ranks)

    async def events(self, session: str) -> list[WorkerEvent]:
        """Returns a session's events since the last call; waits up to `HEARTBEAT_S` seconds for the first. An empty
        list shows that the worker still works.

        Raises:
            KeyError: The session has not begun or has ended.
        """
        events = await self.sessions[session].events()
        if (ended := budget.ended()) is not None and (ended > self.reported_kills or not self.sandboxes_reported):
            events.append(KilledForMemory(ended - self.reported_kills))
            self.reported_kills, self.sandboxes_reported = ended, True
        if time.monotonic() - self.counts_sent_at > COUNTS_S:
            events.append(TimelineCounts(self.timeline.take()))
            self.counts_sent_at = time.monotonic()
        return events

    async def hand_over(self, session: str, keys: Sequence[int]) -> list[StoredTrajectory | None]:
        """Returns the arrays of finished jobs, followed by None after the last is stored.

        Each item becomes a Ray object in this node's memory, owned by the caller, so the object outlives this process.

        Args:
            session: Name of the session.
            keys: The jobs' keys (`TrajectoryJob.key`).

        Raises:
            KeyError: The session is unknown, or a job is not finished or was handed over before; the arrays of the
                jobs before it in `keys` are then lost.
        """
        return [*map(self.sessions[session].hand_over, keys), None]

    async def write_turns(self, session: str, file: Path) -> None:
        """Writes the recorded turns of a session's unfinished trajectories to a file, replacing an existing one
        (`journal.write`); without turns the file has no rows.

        Raises:
            KeyError: The session has ended.
            OSError: The file could not be written, also because its folder does not exist.
        """
        await asyncio.to_thread(journal.write, file, self.sessions[session].journal.all())

    async def end(self, session: str) -> ActivityReport:
        """Ends a session, if not ended before: cancels all trajectories and waits until the environments are closed.
        Returns the timeline counts of the whole worker since the last `TimelineCounts`."""
        if (ended := self.sessions.pop(session, None)) is not None:
            await ended.close()
        return self.timeline.take()


class PhaseSession:
    """A session of the driver on this worker, a phase or a service: agent, tasks, finished arrays and events.

    Args:
        factory: Makes the session's agent.
        sampling: Sampling parameters of the policy.
        service: True for a service, in which trajectories do not wait for each other.
        engines: The driver's view of the engines.
        generator: `rollout.generator`; None if trajectories are sampled one by one.
    """

    def __init__(
        self,
        factory: AgentFactory,
        sampling: SamplingConfig,
        service: bool,
        engines: EngineView,
        generator: TrajectoryGenerator | None = None,
    ) -> None:
        self.factory, self.sampling, self.generator = factory, sampling, generator
        self.engines = KnownEngines(engines, self.report)
        # After a worker crash a request may still run in an engine while another worker retries the trajectory.
        self.agent = factory.agent(self.engines, sampling, service=service, mark=f"@{token_hex(4)}")
        self.router = self.agent.router
        self.router.on_refusal = lambda rank: self.report(EngineAwaitsSync(rank, self.engines.syncs))
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.journal = self.router.journal
        """Turns of unfinished trajectories, kept until the trajectory is handed over."""
        self.arrays: dict[int, tuple[str, StoredTrajectory]] = {}
        """Key → name and arrays of a finished job, kept until the hand-over."""
        self._abandoned: set[int] = set()
        """Keys of abandoned jobs, including jobs not received yet (calls overtake one another) or already ended."""
        self._events: list[WorkerEvent] = []
        self._new_event = asyncio.Event()

    def report(self, event: WorkerEvent) -> None:
        """Queues an event; the next call of `events` returns it."""
        self._events.append(event)
        self._new_event.set()

    async def events(self) -> list[WorkerEvent]:
        """Removes and returns the queued events; waits up to `HEARTBEAT_S` seconds for the first. Empty if none
        came."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._new_event.wait(), HEARTBEAT_S)
            await asyncio.sleep(COALESCE_S)
        self._new_event.clear()
        events, self._events = self._events, []
        return events

    def play(self, job: TrajectoryJob) -> None:
        """Starts a job's trajectory in a task; reports `Cancelled` instead if the job was abandoned before."""
        if job.key in self._abandoned:
            self._abandoned.discard(job.key)
            self._report_each(Cancelled, job)
            return
        task = asyncio.create_task(self._play(job))
        self.tasks[job.key] = task
        task.add_done_callback(lambda _: self._ended(job, task))

    def abandon(self, key: int) -> None:
        """Cancels the job with this key, also a job not received yet. Only the first call has an effect."""
        if key in self._abandoned:  # a second cancel would interrupt the closing of its environment
            return
        self._abandoned.add(key)
        if (task := self.tasks.get(key)) is not None:
            task.cancel()

    def hand_over(self, key: int) -> StoredTrajectory:
        """Returns the arrays of a finished job and drops them and the job's recorded turns. Raises KeyError for a job
        not finished or already handed over."""
        name, arrays = self.arrays.pop(key)
        self.journal.forget(name)
        return arrays

    def rejoin(self, engines: EngineView) -> None:
        """Takes over the driver's view after a weight sync and lets its serving engines accept requests again; ignores
        a view from before the latest known sync. Raises ValueError if the view has fewer actors than before."""
        if engines.syncs < self.engines.syncs:
            return
        self.engines.update(engines)
        self.router.rejoin()

    async def close(self) -> None:
        """Cancels all trajectories, waits until the environments are closed, and cancels requests in progress."""
        for key in [*self.tasks]:
            self.abandon(key)
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        self.router.close()

    async def _play(self, job: TrajectoryJob) -> None:
        spans: list[Span] | None = [] if job.traced else None
        agent = copy(self.agent)
        agent.spans = lambda: spans
        self.journal.add(job.recorded)
        names = job.names or (job.name,)
        if job.fault:
            samples = range(len(names)) if job.names else [job.sample]
            trajectories = [agent.failed_trajectory(job.prompt, sample, job.fault) for sample in samples]
        elif job.names:
            assert self.generator is not None
            trajectories = await GroupPlayer(agent, self.generator).play_group(job.prompt, names)
        else:
            trajectories = [await agent.play(job.prompt, job.sample, job.name)]
        for key, name, trajectory in zip(job.keys, names, trajectories, strict=True):
            small, arrays = detach_arrays(trajectory)
            small.prompt = DRIVER_PROMPT
            self.arrays[key] = name, arrays
            self.report(Finished(key, small, (spans or ()) if key == job.key else ()))

    def _report_each(self, event: Callable[[int], WorkerEvent], job: TrajectoryJob) -> None:
        for key in job.keys:
            self.report(event(key))

    def _ended(self, job: TrajectoryJob, task: asyncio.Task[None]) -> None:
        del self.tasks[job.key]
        self._abandoned.discard(job.key)
        if task.cancelled() or task.exception() is not None:
            for name in job.names or (job.name,):
                self.journal.forget(name)
        if task.cancelled():
            self._report_each(Cancelled, job)
        elif (error := task.exception()) is not None:
            failure = error if isinstance(error, ActorFailed) else ActorFailed("rollout", None, "play", describe(error))
            self._report_each(lambda key: RolloutFailed(key, failure), job)


@dataclass
class KnownGroup:
    """Engine actors by rank."""

    name: str
    actors: list[Any]


class KnownEngines:
    """The part of the engine fleet used by a router. Reports dead engines to the driver for a restart."""

    def __init__(self, engines: EngineView, report: Callable[[WorkerEvent], None]) -> None:
        self.report = report
        self.group = KnownGroup(engines.name, engines.actors)
        self.update(engines)

    def update(self, engines: EngineView) -> None:
        """Takes over the driver's current view. An unchanged engine keeps the old handle, because the router compares
        handles by identity.

        The view has the actors known before, by rank, and possibly further ones: a restarted engine has another handle
        at its rank, and an engine out of service is only absent from `serving`.

        Raises:
            ValueError: The view has fewer actors.
        """
        known = self.group.actors
        if len(engines.actors) < len(known):
            raise ValueError(f"{len(engines.actors)} engines instead of at least {len(known)}: a rank is never removed")
        kept = [old if old == new else new for old, new in zip(known, engines.actors, strict=False)]
        self.group.actors = [*kept, *engines.actors[len(known) :]]
        self.facts, self.serving, self.syncs = engines.facts, list(engines.serving), engines.syncs

    def retire(self, rank: int, error: BaseException | str) -> None:
        """Takes an engine out of service in this session and reports `EngineDead` to the driver, which restarts the
        engine. Does nothing if the engine is out of service already. `error` is the failure."""
        if rank in self.serving:
            self.serving.remove(rank)
            self.report(EngineDead(rank, self.group.actors[rank], describe(error)))

    def remove(self, ranks: Sequence[int]) -> None:
        """Takes the engines with these ranks, which are leaving the run, out of service in this session. Ranks out of
        service already are ignored."""
        self.serving = [rank for rank in self.serving if rank not in ranks]

    def check(self) -> None:
        """Raises NoServingActor if no engine is in service."""
        if not self.serving:
            raise NoServingActor(self.group.name, None, "service", "no engine is available to this rollout worker")
