"""The driver's client of the rollout workers, for a phase or a service."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from secrets import token_hex
from typing import Any

from skyrl_mega.cluster.errors import ActorFailed, describe
from skyrl_mega.cluster.fleet import Fleet, NoServingActor
from skyrl_mega.config.schema import SamplingConfig
from skyrl_mega.engines.base import Facts
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.envs.sandbox import budget
from skyrl_mega.rollout import journal
from skyrl_mega.rollout.gate import Start
from skyrl_mega.rollout.journal import Journal, RecordedTurn
from skyrl_mega.rollout.workers import crash_isolation
from skyrl_mega.rollout.workers.crash_isolation import CrashHistory
from skyrl_mega.rollout.workers.group import Workers
from skyrl_mega.rollout.workers.link import Answer, WorkerLink, WorkerLost
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
from skyrl_mega.telemetry.events import Event
from skyrl_mega.telemetry.timeline import ActivityReport
from skyrl_mega.telemetry.trace import Span
from skyrl_mega.trajectories.by_reference import attach_arrays
from skyrl_mega.trajectories.trajectory import Trajectory

SILENCE_S = 120.0
"""Seconds without a message after which a worker counts as dead. A worker without news reports every second."""
LOOK_EVERY_S = 0.5
"""Seconds between two looks for a worker, while no worker is up or none may run the trajectory."""
WRITE_S = 30.0
"""Seconds for a worker to write the recorded turns: a checkpoint waits for the file, but is valid without it."""
END_S = 60.0
"""Seconds for closing the environment of an abandoned trajectory."""


class WorkerClient:
    """A client that runs trajectories on the rollout workers, in a session at every worker. Lives in a single event
    loop, and also serves as the router of the trajectories' requests.

    A trajectory goes to the worker with the fewest trajectories. After a worker crash the trajectories are retried on
    other workers, from the prompts and under the same names. A trajectory that keeps crashing workers fails
    (`crash_isolation`).

    Args:
        workers: The rollout workers.
        engines: The engines used by the workers.
        sampling: Sampling parameters.
        service: True if requests without an engine wait for the next `rejoin`, instead of failing.
        spans: Returns the list that records environment calls at present, or None.
    """

    def __init__(
        self,
        workers: Workers,
        engines: Fleet,
        sampling: SamplingConfig,
        *,
        service: bool,
        spans: Callable[[], list[Span] | None],
    ) -> None:
        self.workers, self.engines, self.sampling, self.service, self.spans = workers, engines, sampling, service, spans
        self.name = token_hex(8)
        """The session's name at every worker."""
        self.awaiting_sync: set[int] = set()
        """Ranks of engines that refused a request; cleared by the next weight sync."""
        self.router = self
        self.links: dict[int, WorkerLink] = {}
        """Rank → connection to the worker."""
        self.on_counts: Callable[[ActivityReport, object], None] = lambda taken, process: None
        """Receives the timeline counts of a worker and a key of its process."""
        self.syncs = 0
        """Weight syncs after which engines accept requests again."""
        self.journal = Journal()
        """Turns recorded by an earlier run; `play` sends a trajectory's turns to the worker for reuse."""
        self._sent: set[asyncio.Task[None]] = set()
        self._keys = count()
        self._sending = False
        self._error: ActorFailed | None = None
        """The error that ended the session, if any."""

    async def play(self, prompt: Prompt, sample: int, name: str, start: Start | None = None) -> Trajectory:
        """Runs a trajectory on a worker, from opening to closing the environment, and returns the trajectory; ignores
        `start`. Waits, without limit, for a worker that may run the trajectory. Arguments as in `Player.play`.

        After a crash of the worker, runs the trajectory again. A trajectory that keeps crashing workers is returned
        with a failed status.

        Raises:
            NoServingActor: No engine is left, in a phase.
            ActorFailed: An engine refused a request, no engine or worker is left and none restarts, or another error
                ended the trajectory on the worker, such as WrongRoutes; the text names that error.
        """
        (trajectory,) = await self._play(prompt, sample, name)
        return trajectory

    async def play_group(self, prompt: Prompt, names: Sequence[str], start: Start | None = None) -> list[Trajectory]:
        """Runs a whole group, made by `rollout.generator`, on a worker and returns its trajectories, one for each of
        `names`; ignores `start`. Waits, without limit, for a worker that may run the group. Arguments as in
        `PlaysGroups.play_group`.

        After a crash of the worker, runs the whole group again. The trajectories of a group that keeps crashing workers
        are returned with a failed status.

        Raises:
            NoServingActor, ActorFailed: See `play`.
        """
        return await self._play(prompt, 0, names[0], tuple(names))

    async def _play(self, prompt: Prompt, sample: int, name: str, names: tuple[str, ...] = ()) -> list[Trajectory]:
        history, fault = CrashHistory(), ""
        try:
            while True:
                link = await self._link(history, None if fault else prompt)
                recorded = [turn for known in names or (name,) for turn in self.journal.of(known)]
                key, *_ = (next(self._keys) for _ in names or (name,))
                traced = self.spans() is not None
                job = TrajectoryJob(key, prompt, sample, name, traced, recorded, fault=fault, names=names)
                try:
                    trajectories = await self._run_job(link, job, history)
                except WorkerLost as lost:
                    if lost.received:
                        history.record(link.actor)
                    if history.failed:
                        fault = self._fault(prompt, name, history, str(lost))
                        history = CrashHistory()
                    continue
                for trajectory in trajectories:
                    trajectory.prompt = prompt
                return trajectories
        finally:
            self.workers.cancel_wait(history)

    def _fault(self, prompt: Prompt, name: str, history: CrashHistory, cause: str) -> str:
        """Records that a trajectory crashes workers and returns the error text for the trajectory."""
        self.workers.crashing_prompts.setdefault(prompt.uid, set()).add(crash_isolation.prompt_hash(prompt))
        self.workers.explain(history)
        fault = (
            f"environment {prompt.env_class} crashed {len(history.workers)} rollout workers, {history.alone} of them "
            f"while it ran alone; last error: {cause}"
        )
        text = f"trajectory {name} failed: {fault}"
        self.workers.say(Event("trajectory_failed", text, trajectory=name, environment=prompt.env_class, cause=cause))
        return fault

    def expect(self, trajectories: int) -> None:
        """Does nothing: only the lockstep router needs the number of trajectories."""

    def leave(self) -> None:
        """Does nothing: only the lockstep router needs the number of trajectories."""

    def close(self) -> None:
        """Begins to end this client's session at every worker, without waiting for the workers; these abandon its
        trajectories. Errors of dead workers are ignored.

        Cancel all calls of `play` and `play_group` first: such a call would otherwise wait forever.
        """
        for link in self.links.values():
            assert link.listening is not None
            link.listening.cancel()  # `_listen` then ends the session at the worker

    def rejoin(self) -> None:
        """Sends the list of serving engines to the workers after a weight sync, without waiting; requests to these
        engines are accepted again."""
        self.syncs += 1
        self.awaiting_sync.clear()
        for link in self.links.values():
            if link.ready:
                link.actor.rejoin.remote(self.name, self._engines())

    async def write_turns(self, folder: Path) -> list[RecordedTurn]:
        """Has each worker write the turns of its unfinished trajectories to a file in `folder`, and waits up to
        `WRITE_S` seconds. Returns the turns of `journal`, as a worker may not know all of these yet. The turns of a
        crashed or slow worker are lost.

        Raises:
            ActorFailed: A worker could not write the file.
        """
        before = self.journal.all()
        await asyncio.gather(*(self._write_turns(link, folder) for link in self.links.values() if link.ready))
        return before

    async def _write_turns(self, link: WorkerLink, folder: Path) -> None:
        import ray

        name = f"{self.workers.group.name}-{link.rank}"
        file = journal.file_of(folder.absolute(), name)
        try:
            await asyncio.wait_for(link.actor.write_turns.remote(self.name, file), WRITE_S)
        except ray.exceptions.RayTaskError as error:
            raise ActorFailed(self.workers.group.name, link.rank, "write_turns", describe(error)) from None
        except ray.exceptions.RayError:
            return  # `_listen` handles the same error
        except TimeoutError:
            self.workers.say(
                f"{name} did not write its recorded turns within {WRITE_S:g} s; a resumed run generates these "
                "turns again"
            )

    async def _link(self, history: CrashHistory, prompt: Prompt | None) -> WorkerLink:
        """Waits for a worker that may run this trajectory and returns the connection to the worker. `prompt` is None
        for a trajectory already marked as failed.

        Raises:
            NoServingActor: In a phase, no engine is left while waiting.
        """
        while self._error is None:
            history.sibling_failed = prompt is not None and self.workers.is_crashing(prompt)
            up = self.workers.running()
            for rank, actor in up.items():
                if rank not in self.links or self.links[rank].actor != actor:
                    link = self.links[rank] = WorkerLink(rank, actor)
                    link.listening = asyncio.create_task(self._listen(link))
            if (chosen := self.workers.place(up, history)) is not None:
                return self.links[chosen]
            if not self.service:
                self.engines.check()
            await asyncio.sleep(LOOK_EVERY_S)
        raise self._error.with_traceback(None)  # else the frames of all trajectories would add up

    def _engines(self) -> EngineView:
        fleet = self.engines
        facts = [_worker_share(facts, len(self.workers.group)) for facts in fleet.facts]
        return EngineView(fleet.group.name, [*fleet.group.actors], facts, [*fleet.serving], self.syncs)

    async def _run_job(self, link: WorkerLink, job: TrajectoryJob, history: CrashHistory) -> list[Trajectory]:
        loop = asyncio.get_running_loop()
        answers: dict[int, Answer] = {key: loop.create_future() for key in job.keys}
        link.waiting |= answers
        link.jobs.append(job)
        self._send()
        try:
            trajectories = [await asyncio.shield(answer) for answer in answers.values()]
        except asyncio.CancelledError:
            link.abandoned.append(job.key)
            self._send()
            await asyncio.wait(answers.values(), timeout=END_S)
            raise
        finally:
            for answer in answers.values():
                if answer.done() and not answer.cancelled():
                    answer.exception()  # marks the error as retrieved
            self.workers.finished(link.actor, history)
        finished = [trajectory for trajectory in trajectories if trajectory is not None]
        assert len(finished) == len(answers)
        return finished

    def _send(self) -> None:
        """Schedules a message per worker with everything requested in this turn of the event loop."""
        if not self._sending:
            self._sending = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._sending = False
        for link in self.links.values():
            link.drop_abandoned()
            if not link.ready:
                continue
            jobs, link.jobs = link.jobs, []
            if jobs:
                sent = asyncio.create_task(self._check_accepted(link, link.actor.play.remote(self.name, jobs)))
                self._sent.add(sent)
                sent.add_done_callback(self._sent.discard)
            if link.abandoned:
                link.actor.abandon.remote(self.name, link.abandoned)
                link.abandoned = []

    async def _check_accepted(self, link: WorkerLink, sent: Any) -> None:
        """Waits for a worker to accept new jobs. A worker unable to read jobs would still look healthy, so such an
        error ends the session."""
        import ray

        try:
            await sent
        except ray.exceptions.RayTaskError as error:
            self._fail(ActorFailed(self.workers.group.name, link.rank, "play", describe(error)))
        except ray.exceptions.RayError:
            return  # `_listen` handles the same error

    async def _listen(self, link: WorkerLink) -> None:
        """Receives a worker's events for as long as the worker lives and the session lasts."""
        import ray

        try:
            begin = link.actor.begin.remote(self.name, self.sampling, self.service, self._engines())
            await asyncio.wait_for(begin, SILENCE_S)
            link.ready = True
            if self.service:
                link.actor.rejoin.remote(self.name, self._engines())  # the engines may have changed meanwhile
            self._send()
            while True:
                link.report_left(self.name, self.engines.left)
                events: list[WorkerEvent] = await asyncio.wait_for(link.actor.events.remote(self.name), SILENCE_S)
                for event in events:  # first: a crash before the hand-over must not lose the counts
                    if isinstance(event, TimelineCounts):
                        self.on_counts(event.taken, (link.rank, id(link.actor)))
                await self._receive(link, [event for event in events if isinstance(event, Finished)])
                for event in events:
                    self._handle(link, event)
        except ray.exceptions.RayTaskError as error:  # the worker is healthy: a bug in our code
            self._fail(ActorFailed(self.workers.group.name, link.rank, "news", describe(error)))
        except ray.exceptions.RayError as error:
            self._handle_crash(link, describe(error))
        except TimeoutError:
            self._handle_crash(link, f"no sign of life within {SILENCE_S:g} s")
        except Exception as error:  # a bug in our code: without a listener all tasks would wait forever
            self._fail(ActorFailed(self.workers.group.name, link.rank, "news", describe(error)))
        finally:
            try:
                await self._end(link)
            finally:
                link.ready = False  # the worker does not know the session any more
                link.fail(WorkerLost("", received=False))

    async def _receive(self, link: WorkerLink, finished: Sequence[Finished]) -> None:
        """Takes ownership of the arrays of finished trajectories without fetching: the arrays stay in the memory of the
        worker's node.

        A trajectory is reported as finished only afterwards, so the arrays exist even if the worker dies.
        """
        if finished:
            hand_over = link.actor.hand_over.options(num_returns=len(finished) + 1)
            *refs, stored = hand_over.remote(self.name, [event.key for event in finished])
            await asyncio.wait_for(stored, SILENCE_S)
            for event, ref in zip(finished, refs, strict=True):
                attach_arrays(event.trajectory, ref)

    async def _end(self, link: WorkerLink) -> None:
        """Ends the session at a worker, which closes its open environments; waits at most `END_S` seconds."""
        import ray

        with suppress(ray.exceptions.RayError, TimeoutError):
            self.on_counts(await asyncio.wait_for(link.actor.end.remote(self.name), END_S), (link.rank, id(link.actor)))

    def _handle_crash(self, link: WorkerLink, cause: str) -> None:
        self.workers.crashed(link.rank, link.actor, cause, received=bool(link.received()))
        link.report_crash(cause)  # before `_end`, which may take long

    def _handle(self, link: WorkerLink, event: WorkerEvent) -> None:
        match event:
            case Finished(key, trajectory, spans):
                if spans and (recorded := self.spans()) is not None:
                    recorded += spans
                link.answer(key, trajectory)
            case Cancelled(key):
                link.answer(key, None)
            case RolloutFailed(key):
                if (answer := link.waiting.pop(key, None)) is not None and not answer.done():
                    answer.set_exception(self._error_of(event))
            case EngineDead(rank, actor, cause):
                self._retire(rank, actor, cause)
            case EngineAwaitsSync(rank, syncs):
                if syncs == self.syncs:  # else a later sync made the report outdated
                    self.awaiting_sync.add(rank)
            case KilledForMemory(programs):
                budget.add_ended(programs)
            case TimelineCounts():
                pass  # `_listen` counted it

    def _error_of(self, failed: RolloutFailed) -> ActorFailed:
        """Returns the driver's own error if no engine serves any more, else the error of the worker."""
        if isinstance(failed.error, NoServingActor):
            try:
                self.engines.check()
            except ActorFailed as error:
                return error
        return failed.error

    def _retire(self, rank: int, actor: Any, cause: str) -> None:
        """Takes an engine out of service after a worker found it dead, unless another actor already took its rank."""
        if self.engines.group.actors[rank] != actor:
            return
        try:
            self.engines.retire(rank, cause)
        except ActorFailed as error:
            self._fail(error)

    def _fail(self, error: ActorFailed) -> None:
        self._error = error
        for link in self.links.values():
            link.fail(error)


def _worker_share(facts: Facts | None, workers: int) -> Facts | None:
    """Returns the facts of an engine with a worker's share of the KV cache."""
    return None if facts is None else replace(facts, cache_tokens=facts.cache_tokens // workers)
