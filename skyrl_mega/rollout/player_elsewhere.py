"""Has trajectories played by other processes: one phase, or a service, as the driver sees it."""

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
from skyrl_mega.rollout import journal, suspects
from skyrl_mega.rollout.by_reference import joined
from skyrl_mega.rollout.journal import Said
from skyrl_mega.rollout.orders import (
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
from skyrl_mega.rollout.suspects import Death, Loss, Record
from skyrl_mega.rollout.trajectory import Trajectory
from skyrl_mega.rollout.workers import Workers
from skyrl_mega.telemetry.timeline import Taken
from skyrl_mega.telemetry.trace import Span

SILENCE_S = 120.0
"""A worker tells every second that it has no news. One that says nothing for so long is taken for dead."""
LOOK_EVERY_S = 0.5
"""While no worker is up, or none that may have a trajectory."""
WRITE_S = 30.0
"""For a worker to write what the policy has said: a checkpoint waits for it, and can do without."""
END_S = 60.0
"""For an environment to be closed whose trajectory is abandoned."""


class _Lost(Exception):
    """A worker died: its orders are for another."""

    def __init__(self, death: Death) -> None:
        super().__init__(death.cause)
        self.death = death


@dataclass
class Waiting:
    """For the outcome of an order."""

    answer: asyncio.Future[Trajectory | None]
    """None of one that was abandoned."""
    deaths: int
    """Of workers that had it open before."""


@dataclass(eq=False)
class Line:
    """To one life of one worker."""

    rank: int
    actor: Any
    waiting: dict[int, Waiting] = field(default_factory=dict)
    """Orders under way, by key."""
    orders: list[Order] = field(default_factory=list)
    """Not sent yet."""
    abandoned: list[int] = field(default_factory=list)
    """Keys, not sent yet."""
    begun: bool = False
    """Whether the worker knows of the session; nothing else is sent before, as calls may overtake one another."""
    listening: asyncio.Task[None] | None = None

    def fail(self, error: BaseException) -> None:
        """Tells all who wait."""
        for one in self.waiting.values():
            _raise(one.answer, error)
        self.waiting.clear()

    def heard(self) -> set[int]:
        """Keys of orders that the worker knows of."""
        return self.waiting.keys() - {order.key for order in self.orders} if self.begun else set()

    def lose(self, cause: str, *, alone: bool, loss: Loss | None = None) -> None:
        """The worker has died, with one trajectory `alone` or with those that it had heard of."""
        heard = self.heard()
        for key, one in self.waiting.items():
            _raise(one.answer, _Lost(Death(cause, key in heard, alone and key in heard, loss)))
        self.waiting.clear()


class PlayerElsewhere:
    """Plays trajectories in the run's workers. Lives in one event loop; also the desk of its trajectories' requests.

    A trajectory goes to the worker with the fewest. Those of a worker that dies are played again by others, from their
    prompts, with the same names, but for one that workers die of time and again: it has failed (`suspects`).

    Args:
        workers: Who plays.
        engines: Whom they ask.
        sampling: How tokens are drawn.
        service: Requests that no engine can take wait for one that comes back, with the next `rejoin`.
        spans: Where calls of environments are recorded at present.
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
        """Of the session at every worker."""
        self.resting: set[int] = set()
        """Engines that have refused a request, until the next sync."""
        self.router = self
        self.lines: dict[int, Line] = {}
        """By rank."""
        self.counted: Callable[[Taken, object], None] = lambda taken, process: None
        """Told what workers had under way, and which."""
        self.syncs = 0
        """After which engines were told to take requests again."""
        self._said: dict[str, list[Said]] = {}
        """Turns that were played before, by trajectory."""
        self._sent: set[asyncio.Task[None]] = set()
        self._keys = count()
        self._sending = False
        self._error: ActorFailed | None = None
        """Why nothing can be played any more."""

    async def play(self, prompt: Prompt, sample: int, name: str) -> Trajectory:
        """Has a trajectory opened, played to its end and closed.

        Raises:
            NobodyServes: No engine is left.
            ActorFailed: An engine refused a request, or no worker is left and none comes back.
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
        """Why a trajectory has failed that workers died of."""
        self.workers.guilty.setdefault(prompt.uid, set()).add(suspects.digest(prompt))
        self.workers.explained(record.losses)
        fault = (
            f"environment {prompt.env_class}: {record.deaths} processes died with it, {record.alone} of them with "
            f"nothing else, the last one: {cause}"
        )
        self.workers.say(f"trajectory {name} has failed: {fault}")
        return fault

    def expect(self, players: int) -> None:
        """Nobody waits for the others."""

    def leave(self) -> None:
        """Nor here."""

    def close(self) -> None:
        """Nobody waits for what is under way any more."""
        for line in self.lines.values():
            assert line.listening is not None
            line.listening.cancel()  # which ends the session at the worker

    def rejoin(self) -> None:
        """Takes in engines that have come back, and goes on."""
        self.syncs += 1
        self.resting.clear()
        for line in self.lines.values():
            if line.begun:
                line.actor.rejoin.remote(self.name, self._engines())

    def remember(self, said: Sequence[Said]) -> None:
        """Turns of trajectories that are about to be played."""
        for one in said:
            self._said.setdefault(one.trajectory, []).append(one)

    async def write_said(self, folder: Path) -> list[Said]:
        """Each worker writes the turns of those that it plays; returns those of before that none may have heard of yet.
        Turns of a worker that dies are lost with it.

        Raises:
            ActorFailed: A worker could not write them.
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
            return  # `_listen` hears of it too
        except TimeoutError:
            self.workers.say(
                f"{name} has not written what the policy has said within {WRITE_S:g} s: a run that resumes asks for it "
                "again"
            )

    def forget(self, trajectory: str) -> None:
        """It has ended."""
        self._said.pop(trajectory, None)

    async def _line(self, name: str, record: Record, prompt: Prompt | None) -> Line:
        """To the worker that is given a trajectory of this record, and of this prompt unless it has failed.

        Raises:
            NobodyServes: No engine is left while it waits, in a phase.
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
            await asyncio.wait([answer], timeout=END_S)  # until its environment is closed
            if answer.done() and not answer.cancelled():
                answer.exception()
            raise
        finally:
            self.workers.closed(line.actor, deaths)
        assert trajectory is not None
        return trajectory

    def _send(self) -> None:
        """What is asked for in one turn of the event loop travels in one message to each worker."""
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
        """A worker that cannot read its orders would play none of them, and be well."""
        import ray

        try:
            await sent
        except ray.exceptions.RayTaskError as error:
            self._fail(ActorFailed(f"{self.workers.group.name}-{line.rank}", line.rank, "play", describe(error)))
        except ray.exceptions.RayError:
            return  # `_listen` hears of it too

    async def _listen(self, line: Line) -> None:
        """Takes in a worker's news for as long as it lives and the session lasts."""
        import ray

        try:
            begin = line.actor.begin.remote(self.name, self.sampling, self.service, self._engines())
            await asyncio.wait_for(begin, SILENCE_S)
            line.begun = True
            if self.service:
                line.actor.rejoin.remote(self.name, self._engines())  # they may have changed meanwhile
            self._send()
            while True:
                heard: list[News] = await asyncio.wait_for(line.actor.news.remote(self.name), SILENCE_S)
                for news in heard:  # also where the worker dies before it has handed over what it played
                    if isinstance(news, Counts):
                        self.counted(news.taken, (line.rank, id(line.actor)))
                await self._receive(line, [news for news in heard if isinstance(news, Played)])
                for news in heard:
                    self._hear(line, news)
        except ray.exceptions.RayTaskError as error:  # the worker is well: a defect of ours
            self._fail(ActorFailed(f"{self.workers.group.name}-{line.rank}", line.rank, "news", describe(error)))
        except ray.exceptions.RayError as error:
            self._lose(line, describe(error))
        except TimeoutError:
            self._lose(line, f"no sign of life within {SILENCE_S:g} s")
        except Exception as error:  # a defect of ours: without anybody who listens all would wait for ever
            self._fail(ActorFailed(f"{self.workers.group.name}-{line.rank}", line.rank, "news", describe(error)))
        finally:
            try:
                await self._end(line)
            finally:
                line.begun = False  # its worker knows of the session no longer
                line.fail(_Lost(Death("", counts=False, alone=False)))

    async def _receive(self, line: Line, played: Sequence[Played]) -> None:
        """Takes over the arrays of what was played, unseen: they stay in the memory of the worker's node.

        Where a trajectory is told of as played they are there, whatever becomes of the worker.
        """
        if played:
            hand_over = line.actor.hand_over.options(num_returns=len(played) + 1)
            *refs, whole = hand_over.remote(self.name, [news.key for news in played])
            await asyncio.wait_for(whole, SILENCE_S)
            for news, ref in zip(played, refs, strict=True):
                joined(news.trajectory, ref)

    async def _end(self, line: Line) -> None:
        """Ends the session at a worker, which closes what is open there; not for longer than `END_S`."""
        import ray

        with suppress(ray.exceptions.RayError, TimeoutError):
            self.counted(await asyncio.wait_for(line.actor.end.remote(self.name), END_S), (line.rank, id(line.actor)))

    def _lose(self, line: Line, cause: str) -> None:
        loss = self.workers.lost(line.rank, line.actor, cause, heard=bool(line.heard()))
        alone = loss is not None and len(line.heard()) == 1 and len(loss.had) == 1 and loss.had[0] >= suspects.SUSPECTED
        line.lose(cause, alone=alone, loss=loss)  # before its session's end, which may take long

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
                if syncs == self.syncs:  # else a sync has come since
                    self.resting.add(rank)
            case EndedForMemory(programs):
                budget.hear(programs)
            case Counts():
                pass  # counted already

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
        """A worker has found an engine dead, unless another is in its place already."""
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
    """To whoever waits for it."""
    if not answer.done():
        answer.set_exception(error)
        answer.exception()  # perhaps nobody waits any more, which is no fault


def _share(facts: Facts | None, workers: int) -> Facts | None:
    """What one of several workers may fill of an engine's cache."""
    return None if facts is None else replace(facts, cache_tokens=facts.cache_tokens // workers)
