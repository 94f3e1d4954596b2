"""The driver's client of the rollout workers, for a phase or a service."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from secrets import token_hex
from typing import Any

from skyrl_mega.cluster.errors import ActorFailed
from skyrl_mega.cluster.fleet import Fleet, NobodyServes
from skyrl_mega.cluster.group import describe
from skyrl_mega.config.schema import SamplingConfig
from skyrl_mega.engines.base import Facts
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.envs.sandbox import budget
from skyrl_mega.rollout import crash_isolation, journal
from skyrl_mega.rollout.by_reference import joined
from skyrl_mega.rollout.crash_isolation import Death, Loss, Record
from skyrl_mega.rollout.journal import Said
from skyrl_mega.rollout.trajectory import Trajectory
from skyrl_mega.rollout.worker_messages import (
    Counts,
    EndedForMemory,
    EngineDead,
    EngineRests,
    EnginesNow,
    Failed,
    News,
    Order,
    Played,
    Stopped,
)
from skyrl_mega.rollout.workers import Workers
from skyrl_mega.telemetry.timeline import Taken
from skyrl_mega.telemetry.trace import Span

SILENCE_S = 120.0
"""Seconds without a message after which a worker counts as dead. A worker without news reports every second."""
LOOK_EVERY_S = 0.5
"""Seconds between two looks for a worker, while no worker is up or none may run the trajectory."""
WRITE_S = 30.0
"""Seconds for a worker to write the recorded turns: a checkpoint waits for the file, but is valid without."""
END_S = 60.0
"""Seconds for closing the environment of an abandoned trajectory."""


class _Lost(Exception):
    """A worker died; the trajectories must be sent to another worker."""

    def __init__(self, death: Death) -> None:
        super().__init__(death.cause)
        self.death = death


@dataclass
class Waiting:
    """A trajectory in progress at a worker."""

    answer: asyncio.Future[Trajectory | None]
    """The finished trajectory; None for an abandoned trajectory."""
    deaths: int
    """Earlier crashes of the trajectory."""


@dataclass(eq=False)
class Line:
    """The driver's connection to an incarnation of a worker; a restarted worker gets a new connection."""

    rank: int
    actor: Any
    waiting: dict[int, Waiting] = field(default_factory=dict)
    """Trajectories in progress, by order key."""
    orders: list[Order] = field(default_factory=list)
    """Orders not sent yet."""
    abandoned: list[int] = field(default_factory=list)
    """Keys of abandoned orders, not sent yet."""
    begun: bool = False
    """True once the worker knows the session. Nothing else is sent before, because calls may overtake each other."""
    listening: asyncio.Task[None] | None = None

    def fail(self, error: BaseException) -> None:
        """Raises the error in all tasks waiting for this worker."""
        for one in self.waiting.values():
            _raise(one.answer, error)
        self.waiting.clear()

    def heard(self) -> set[int]:
        """Returns the keys of the orders received by the worker."""
        return self.waiting.keys() - {order.key for order in self.orders} if self.begun else set()

    def lose(self, cause: str, *, alone: bool, loss: Loss | None = None) -> None:
        """Reports the worker's crash to all waiting tasks. With `alone`, the only order received by the worker counts a
        solo crash."""
        heard = self.heard()
        for key, one in self.waiting.items():
            _raise(one.answer, _Lost(Death(cause, key in heard, alone and key in heard, loss)))
        self.waiting.clear()


class PlayerElsewhere:
    """A client that runs trajectories on the rollout workers. Lives in a single event loop, and also serves as the
    router of the trajectories' requests.

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
        self.resting: set[int] = set()
        """Ranks of engines that refused a request; cleared by the next weight sync."""
        self.router = self
        self.lines: dict[int, Line] = {}
        """Rank → connection to the worker."""
        self.counted: Callable[[Taken, object], None] = lambda taken, process: None
        """Receives the timeline counts of a worker and a key of its process."""
        self.syncs = 0
        """Weight syncs after which engines accept requests again."""
        self._said: dict[str, list[Said]] = {}
        """Turns recorded by an earlier run, by trajectory."""
        self._sent: set[asyncio.Task[None]] = set()
        self._keys = count()
        self._sending = False
        self._error: ActorFailed | None = None
        """The error that ended the session, if any."""

    async def play(self, prompt: Prompt, sample: int, name: str) -> Trajectory:
        """Runs a trajectory on a worker, from opening to closing the environment.

        Raises:
            NobodyServes: No engine is left.
            ActorFailed: An engine refused a request, or no worker is left and none restarts.
        """
        record, fault = Record(), ""
        try:
            while True:
                line = await self._line(name, record, None if fault else prompt)
                said = self._said.get(name, ())
                order = Order(next(self._keys), prompt, sample, name, self.spans() is not None, said, fault=fault)
                try:
                    trajectory = await self._carried_out(line, order, record.suspicion)
                except _Lost as lost:
                    record.add(lost.death)
                    if record.failed:
                        fault = self._fault(prompt, name, record, lost.death.cause)
                        record = Record()
                    continue
                trajectory.prompt = prompt
                return trajectory
        finally:
            self.workers.placed(f"{self.name}/{name}")

    def _fault(self, prompt: Prompt, name: str, record: Record, cause: str) -> str:
        """Records that a trajectory crashes workers and returns the error text for the trajectory."""
        self.workers.guilty.setdefault(prompt.uid, set()).add(crash_isolation.digest(prompt))
        self.workers.explained(record.losses)
        fault = (
            f"environment {prompt.env_class}: {record.deaths} processes died with it, {record.alone} of them with "
            f"nothing else, the last one: {cause}"
        )
        self.workers.say(f"trajectory {name} has failed: {fault}")
        return fault

    def expect(self, players: int) -> None:
        """Does nothing: only the lockstep router needs the number of trajectories."""

    def leave(self) -> None:
        """Does nothing: only the lockstep router needs the number of trajectories."""

    def close(self) -> None:
        """Ends the session at every worker and abandons all trajectories in progress."""
        for line in self.lines.values():
            assert line.listening is not None
            line.listening.cancel()  # `_listen` then ends the session at the worker

    def rejoin(self) -> None:
        """Tells the workers which engines serve after a weight sync."""
        self.syncs += 1
        self.resting.clear()
        for line in self.lines.values():
            if line.begun:
                line.actor.rejoin.remote(self.name, self._engines())

    def remember(self, said: Sequence[Said]) -> None:
        """Stores recorded turns of trajectories about to run."""
        for one in said:
            self._said.setdefault(one.trajectory, []).append(one)

    async def write_said(self, folder: Path) -> list[Said]:
        """Has each worker write recorded turns to a file. Returns the turns passed to `remember`, as a worker may not
        know all of these yet. The turns of a crashed worker are lost.

        Raises:
            ActorFailed: A worker could not write the file.
        """
        before = [one for said in self._said.values() for one in said]
        await asyncio.gather(*(self._write_said(line, folder) for line in self.lines.values() if line.begun))
        return before

    async def _write_said(self, line: Line, folder: Path) -> None:
        import ray

        name = f"{self.workers.group.name}-{line.rank}"
        file = journal.file_of(folder.absolute(), name)
        try:
            await asyncio.wait_for(line.actor.write_said.remote(self.name, file), WRITE_S)
        except ray.exceptions.RayTaskError as error:
            raise ActorFailed(name, line.rank, "write_said", describe(error)) from None
        except ray.exceptions.RayError:
            return  # `_listen` handles the same error
        except TimeoutError:
            self.workers.say(
                f"{name} has not written what the policy has said within {WRITE_S:g} s: a run that resumes asks for it "
                "again"
            )

    def forget(self, trajectory: str) -> None:
        """Drops the recorded turns of a finished trajectory."""
        self._said.pop(trajectory, None)

    async def _line(self, name: str, record: Record, prompt: Prompt | None) -> Line:
        """Waits for a worker that may run this trajectory and returns the connection to the worker. `prompt` is None
        for a trajectory already marked as failed.

        Raises:
            NobodyServes: In a phase, no engine is left while waiting.
        """
        while self._error is None:
            record.kin = prompt is not None and self.workers.is_guilty(prompt)
            up = self.workers.up()
            for rank, actor in up.items():
                if rank not in self.lines or self.lines[rank].actor != actor:
                    line = self.lines[rank] = Line(rank, actor)
                    line.listening = asyncio.create_task(self._listen(line))
            if (given := self.workers.place(up, f"{self.name}/{name}", record.suspicion)) is not None:
                return self.lines[given]
            if not self.service:
                self.engines.check()
            await asyncio.sleep(LOOK_EVERY_S)
        raise self._error

    def _engines(self) -> EnginesNow:
        fleet = self.engines
        facts = [_share(facts, len(self.workers.group)) for facts in fleet.facts]
        return EnginesNow(fleet.group.name, [*fleet.group.actors], facts, [*fleet.serving], self.syncs)

    async def _carried_out(self, line: Line, order: Order, deaths: int) -> Trajectory:
        answer: asyncio.Future[Trajectory | None] = asyncio.get_running_loop().create_future()
        line.waiting[order.key] = Waiting(answer, deaths)
        line.orders.append(order)
        self._send()
        try:
            trajectory = await asyncio.shield(answer)
        except asyncio.CancelledError:
            line.abandoned.append(order.key)
            self._send()
            await asyncio.wait([answer], timeout=END_S)
            if answer.done() and not answer.cancelled():
                answer.exception()
            raise
        finally:
            self.workers.closed(line.actor, deaths)
        assert trajectory is not None
        return trajectory

    def _send(self) -> None:
        """Schedules a message per worker with everything requested in this turn of the event loop."""
        if not self._sending:
            self._sending = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._sending = False
        for line in self.lines.values():
            unsent, abandoned = {order.key for order in line.orders}, {*line.abandoned}
            for key in unsent & abandoned:
                self._answer(line, key, None)
            line.orders = [order for order in line.orders if order.key not in abandoned]
            line.abandoned = sorted(abandoned - unsent)
            if not line.begun:
                continue
            orders, line.orders = line.orders, []
            if orders:
                sent = asyncio.create_task(self._played(line, line.actor.play.remote(self.name, orders)))
                self._sent.add(sent)
                sent.add_done_callback(self._sent.discard)
            if line.abandoned:
                line.actor.abandon.remote(self.name, line.abandoned)
                line.abandoned = []

    async def _played(self, line: Line, sent: Any) -> None:
        """Waits for a worker to accept new orders. A worker unable to read orders would still look healthy, so such an
        error ends the session."""
        import ray

        try:
            await sent
        except ray.exceptions.RayTaskError as error:
            self._fail(ActorFailed(f"{self.workers.group.name}-{line.rank}", line.rank, "play", describe(error)))
        except ray.exceptions.RayError:
            return  # `_listen` handles the same error

    async def _listen(self, line: Line) -> None:
        """Receives a worker's events for as long as the worker lives and the session lasts."""
        import ray

        try:
            begin = line.actor.begin.remote(self.name, self.sampling, self.service, self._engines())
            await asyncio.wait_for(begin, SILENCE_S)
            line.begun = True
            if self.service:
                line.actor.rejoin.remote(self.name, self._engines())  # the engines may have changed meanwhile
            self._send()
            while True:
                heard: list[News] = await asyncio.wait_for(line.actor.news.remote(self.name), SILENCE_S)
                for news in heard:  # first: a crash before the hand-over must not lose the counts
                    if isinstance(news, Counts):
                        self.counted(news.taken, (line.rank, id(line.actor)))
                await self._receive(line, [news for news in heard if isinstance(news, Played)])
                for news in heard:
                    self._hear(line, news)
        except ray.exceptions.RayTaskError as error:  # the worker is healthy: a bug in our code
            self._fail(ActorFailed(f"{self.workers.group.name}-{line.rank}", line.rank, "news", describe(error)))
        except ray.exceptions.RayError as error:
            self._lose(line, describe(error))
        except TimeoutError:
            self._lose(line, f"no sign of life within {SILENCE_S:g} s")
        except Exception as error:  # a bug in our code: without a listener all tasks would wait forever
            self._fail(ActorFailed(f"{self.workers.group.name}-{line.rank}", line.rank, "news", describe(error)))
        finally:
            try:
                await self._end(line)
            finally:
                line.begun = False  # the worker does not know the session any more
                line.fail(_Lost(Death("", counts=False, alone=False)))

    async def _receive(self, line: Line, played: Sequence[Played]) -> None:
        """Takes ownership of the arrays of finished trajectories without fetching: the arrays stay in the memory of the
        worker's node.

        A trajectory is reported as finished only afterwards, so the arrays exist even if the worker dies.
        """
        if played:
            hand_over = line.actor.hand_over.options(num_returns=len(played) + 1)
            *refs, whole = hand_over.remote(self.name, [news.key for news in played])
            await asyncio.wait_for(whole, SILENCE_S)
            for news, ref in zip(played, refs, strict=True):
                joined(news.trajectory, ref)

    async def _end(self, line: Line) -> None:
        """Ends the session at a worker, which closes its open environments; waits at most `END_S` seconds."""
        import ray

        with suppress(ray.exceptions.RayError, TimeoutError):
            self.counted(await asyncio.wait_for(line.actor.end.remote(self.name), END_S), (line.rank, id(line.actor)))

    def _lose(self, line: Line, cause: str) -> None:
        loss = self.workers.lost(line.rank, line.actor, cause, heard=bool(line.heard()))
        alone = (
            loss is not None
            and len(line.heard()) == 1
            and len(loss.had) == 1
            and loss.had[0] >= crash_isolation.SUSPECTED
        )
        line.lose(cause, alone=alone, loss=loss)  # before `_end`, which may take long

    def _hear(self, line: Line, news: News) -> None:
        match news:
            case Played(key, trajectory, spans):
                if spans and (recorded := self.spans()) is not None:
                    recorded += spans
                self._answer(line, key, trajectory)
            case Stopped(key):
                self._answer(line, key, None)
            case Failed(key):
                if (one := line.waiting.pop(key, None)) is not None and not one.answer.done():
                    one.answer.set_exception(self._cause(news))
            case EngineDead(rank, actor, cause):
                self._retire(rank, actor, cause)
            case EngineRests(rank, syncs):
                if syncs == self.syncs:  # else a later sync made the report outdated
                    self.resting.add(rank)
            case EndedForMemory(programs):
                budget.hear(programs)
            case Counts():
                pass  # `_listen` counted it

    def _answer(self, line: Line, key: int, trajectory: Trajectory | None) -> None:
        one = line.waiting.pop(key, None)
        if one is not None and not one.answer.done():
            one.answer.set_result(trajectory)

    def _cause(self, failed: Failed) -> ActorFailed:
        if not failed.nobody:
            return ActorFailed(failed.actor, failed.rank, failed.method, failed.cause)
        try:
            self.engines.check()
        except ActorFailed as error:
            return error
        return NobodyServes(failed.actor, failed.rank, failed.method, failed.cause)

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
        for line in self.lines.values():
            line.fail(error)


def _raise(answer: asyncio.Future[Trajectory | None], error: BaseException) -> None:
    """Raises the error in the task waiting for the answer, if any."""
    if not answer.done():
        answer.set_exception(error)
        answer.exception()  # marks the error as retrieved, as the task may have been cancelled


def _share(facts: Facts | None, workers: int) -> Facts | None:
    """Returns the facts of an engine with a worker's share of the KV cache."""
    return None if facts is None else replace(facts, cache_tokens=facts.cache_tokens // workers)
