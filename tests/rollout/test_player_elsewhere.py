"""Workers that die at any moment, in virtual time: what is asked for is played once, whatever happens to whom."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import ray.exceptions

from skyrl_mega.cluster.errors import ActorFailed
from skyrl_mega.cluster.fleet import NobodyServes
from skyrl_mega.config.schema import SamplingConfig
from skyrl_mega.engines.base import Facts
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.rollout.by_reference import put_away
from skyrl_mega.rollout.orders import EngineDead, EngineRests, EnginesNow, Failed, News, Order, Played, Stopped
from skyrl_mega.rollout.player_elsewhere import Line, PlayerElsewhere, Waiting
from skyrl_mega.rollout.slots import SlotAgent, Slots
from skyrl_mega.rollout.suspects import admitted
from skyrl_mega.rollout.trajectory import Status, Trajectory
from skyrl_mega.rollout.workers import Workers
from skyrl_mega.simulation.virtual_time import VirtualLoop
from skyrl_mega.telemetry.timeline import Taken, Timeline

PROMPT = Prompt(0, [], "", {})


@dataclass
class Arrays:
    """Stands for a reference."""

    key: int
    good: bool = False


class Worker:
    """A worker of one session. Each of its methods has a `remote`, as an actor's."""

    def __init__(self, random: Random) -> None:
        self.random, self.alive = random, True
        self.dies_of: set[int] = set()
        """Samples."""
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.said: asyncio.Queue[News] = asyncio.Queue()
        self.engines: list[EnginesNow] = []
        self.names: list[str] = []
        self.begun: set[str] = set()
        self.early: set[int] = set()
        """Abandoned before they came."""
        self.ended = 0
        for name in ("begin", "play", "abandon", "news", "rejoin", "end"):
            setattr(self, name, SimpleNamespace(remote=self._called(getattr(self, f"_{name}"))))
        self.hand_over = SimpleNamespace(options=lambda num_returns: SimpleNamespace(remote=self._handed_over))

    def _called(self, method: Callable[..., Awaitable[Any]]) -> Callable[..., asyncio.Task[Any]]:
        async def call(*args: Any) -> Any:
            await asyncio.sleep(self.random.uniform(0, 0.02))  # calls overtake one another
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
        self.said.put_nowait(Stopped(-1))  # wakes whoever waits for news

    async def _begin(self, session: str, sampling: object, service: bool, engines: EnginesNow) -> None:
        self.engines.append(engines)
        self.begun.add(session)

    async def _play(self, session: str, orders: list[Order]) -> None:
        assert session in self.begun
        for order in orders:
            self.names.append(order.name)
            if order.key in self.early:
                self.said.put_nowait(Stopped(order.key))
                continue
            self.tasks[order.key] = asyncio.create_task(self._one(order))

    async def _one(self, order: Order) -> None:
        try:
            await asyncio.sleep(self.random.uniform(1, 3))
            if order.sample in self.dies_of and not order.fault:
                self.die()
                return
        except asyncio.CancelledError:
            self.said.put_nowait(Stopped(order.key))
            return
        nothing: Any = array("i")
        status = Status.ERROR_INFRASTRUCTURE if order.fault else Status.COMPLETED
        t = Trajectory(PROMPT, order.sample, nothing, nothing, nothing, 0, 1.0, status, 1)
        t.metadata["error"] = order.fault
        self.said.put_nowait(Played(order.key, put_away(t)[0], ()))

    def _handed_over(self, session: str, keys: list[int]) -> list[Any]:
        """References to arrays, which are good once the last one of the answer is there and no error."""
        refs = [Arrays(key) for key in keys]

        async def kept() -> None:
            await asyncio.sleep(self.random.uniform(0, 0.3))  # storing takes a while
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

    async def _news(self, session: str) -> list[News]:
        assert session in self.begun
        found = [await self.said.get()]
        if not self.alive:
            raise ray.exceptions.RayActorError
        while not self.said.empty():
            found.append(self.said.get_nowait())
        return found

    async def _rejoin(self, session: str, engines: EnginesNow) -> None:
        self.engines.append(engines)

    async def _end(self, session: str) -> Taken:
        self.ended += 1
        return Timeline().take()


class Group:
    """As much of an `ActorGroup` as workers need."""

    def __init__(self, count: int, random: Random) -> None:
        self.name, self.random = "rollout", random
        self.dies_of: set[int] = set()
        self.actors = [Worker(random) for _ in range(count)]
        self.every = [*self.actors]
        self.logs = [f"rollout-{i}.log" for i in range(count)]

    def __len__(self) -> int:
        return len(self.actors)

    def end(self, rank: int) -> None:
        self.actors[rank].alive = False

    def replace(self, rank: int, timeout: float) -> None:
        time.sleep(0.002)
        self.actors[rank] = Worker(self.random)
        self.actors[rank].dies_of = self.dies_of
        self.every.append(self.actors[rank])


class Engines:
    """As much of a `Fleet` as a player needs."""

    def __init__(self) -> None:
        self.group = SimpleNamespace(name="engine", actors=["e0", "e1"])
        self.facts = [Facts(cache_tokens=1000, cache_bytes=1), None]
        self.serving = [0, 1]
        self.restarts = 1

    def retire(self, rank: int, cause: str) -> None:
        if not self.restarts:
            raise ActorFailed("engine-1", 1, "service", cause)
        self.restarts -= 1
        self.serving.remove(rank)

    def check(self) -> None:
        if not self.serving:
            raise NobodyServes("engine", 0, "service", "all are dead")


def player_of(count: int, restarts: int, seed: int = 0) -> tuple[PlayerElsewhere, Group, Workers, Engines, list[str]]:
    group, engines, said = Group(count, Random(seed)), Engines(), []
    any_group: Any = group
    any_engines: Any = engines
    workers = Workers(any_group, restarts=restarts, start_timeout_s=1.0, say=said.append)
    player = PlayerElsewhere(workers, any_engines, SamplingConfig(), service=True, spans=lambda: None)
    return player, group, workers, engines, said


@pytest.mark.parametrize("seed", range(10))
def test_nothing_is_lost_and_nothing_is_doubled(seed: int) -> None:
    chance, slots = Random(seed), Slots(8)

    async def phase() -> None:
        player, group, workers, _, said = player_of(3, 12, seed)
        agent = SlotAgent(player, slots)
        playing = [asyncio.create_task(agent.play(await agent.open(PROMPT, i), f"name {i}")) for i in range(150)]
        for _ in range(12):
            await asyncio.sleep(chance.uniform(0.1, 3))
            if up := workers.up():
                chance.choice([*up.values()]).die()
        played = await asyncio.gather(*playing)
        assert [t.sample for t in played] == [*range(150)]
        assert all(t.away.ref.good for t in played), "none leads to what died with its worker"
        assert all(t.prompt is PROMPT for t in played)
        names = Counter(name for worker in group.every for name in worker.names)
        assert set(names) == {f"name {i}" for i in range(150)}, "the same names, however often"
        assert sum(names.values()) > 150, "some were played again"
        assert any("is lost: its process died" in line and "started again" in line for line in said)
        player.close()
        workers.close()

    with VirtualLoop() as loop:
        loop.run(phase())
    assert slots.use.most == 8


@pytest.mark.parametrize("guilty", [[13], [13, 14], [*range(8, 16)]], ids=["one", "two", "eight"])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_those_that_end_their_process_every_time_fail_and_no_other_does(count: int, guilty: list[int]) -> None:
    """However many they take along, and though they end one another's. Finding out costs no restart in the end."""

    async def phase() -> None:
        player, group, workers, _, said = player_of(count, 10, seed=count)
        group.dies_of = {*guilty}
        for worker in group.actors:
            worker.dies_of = {*guilty}
        played = await asyncio.gather(*(player.play(PROMPT, i, f"name {i}") for i in range(60)))
        assert [t.sample for t in played if t.status is Status.ERROR_INFRASTRUCTURE] == guilty
        assert all(t.status is Status.COMPLETED for t in played if t.sample not in guilty)
        assert "the last 2 with nothing else, the last one: its process died" in played[13].metadata["error"]
        assert played[13].away.ref.good and workers.restarts > 0, "the others go on"
        assert sum(" has failed: environment : " in line for line in said) == len(guilty)
        player.close()
        workers.close()

    with VirtualLoop() as loop:
        loop.run(phase())


@pytest.mark.parametrize("seed", range(6))
def test_where_workers_die_of_nothing_that_they_play_nothing_fails(seed: int) -> None:
    chance = Random(seed)

    async def phase() -> None:
        player, _, workers, _, _ = player_of(3, 60, seed)
        playing = [asyncio.create_task(player.play(PROMPT, i, str(i))) for i in range(120)]
        while not all(task.done() for task in playing):
            await asyncio.sleep(chance.uniform(0.5, 6))
            if (up := workers.up()) and chance.random() < 0.8:
                chance.choice([*up.values()]).die()
        failed = [t.sample for t in await asyncio.gather(*playing) if t.status is not Status.COMPLETED]
        assert not failed
        player.close()
        workers.close()

    with VirtualLoop() as loop:
        loop.run(phase())


def test_another_of_a_prompt_that_ends_its_process_is_alone_from_the_start() -> None:
    async def phase() -> None:
        player, group, workers, _, _ = player_of(2, 10)
        group.dies_of = {*range(8)}
        for worker in group.actors:
            worker.dies_of = group.dies_of
        first = await player.play(PROMPT, 0, "first")
        left = workers.restarts
        others = [asyncio.create_task(player.play(replace(PROMPT, uid=1), 60 + i, str(i))) for i in range(20)]
        second = await player.play(PROMPT, 1, "second")
        assert [first.status, second.status] == [Status.ERROR_INFRASTRUCTURE] * 2
        assert workers.restarts == left, "it took no other along"
        assert all(t.status is Status.COMPLETED for t in await asyncio.gather(*others))
        player.close()
        workers.close()

    with VirtualLoop() as loop:
        loop.run(phase())


def test_a_worker_that_plays_for_somebody_else_too_proves_nothing() -> None:
    """As for an evaluation, whose trajectories another session has."""

    async def phase() -> None:
        player, group, workers, _, _ = player_of(1, 10)
        (worker,) = group.actors
        workers.opened(worker, 1)
        playing = asyncio.create_task(player.play(PROMPT, 0, "0"))
        await asyncio.sleep(0.5)
        for _ in range(4):
            (actor,) = group.actors
            workers.opened(actor, 1)
            actor.die()
            await asyncio.sleep(4)
        assert (await playing).status is Status.COMPLETED
        player.close()
        workers.close()

    with VirtualLoop() as loop:
        loop.run(phase())


def test_what_a_worker_has_not_heard_of_is_not_what_it_died_of() -> None:
    line = Line(0, None)
    line.begun = True

    async def deaths() -> list[tuple[bool, bool]]:
        answers: list[asyncio.Future[Trajectory | None]] = [asyncio.Future() for _ in range(2)]
        line.waiting = {key: Waiting(answer, 0) for key, answer in enumerate(answers)}
        line.orders = [Order(0, PROMPT, 0, "", False)]
        line.lose("it died", alone=True)
        lost: list[Any] = [answer.exception() for answer in answers]
        return [(one.death.counts, one.death.alone) for one in lost]

    assert asyncio.run(deaths()) == [(False, False), (True, True)]


def test_who_may_share_a_worker() -> None:
    open_to = partial(admitted, reserved=False)
    assert open_to(0, [1, 1, 0]) and open_to(1, []) and not open_to(0, [2]) and not open_to(1, [0, 3])
    assert not admitted(0, [], reserved=True) and admitted(2, [], reserved=True)
    assert open_to(2, [2] * 31) and not open_to(2, [2] * 32) and not open_to(2, [2, 0])
    assert open_to(3, [2] * 5) and not open_to(2, [3] * 6) and not open_to(2, [4]) and not open_to(9, [2])


def test_others_go_on_without_one_that_stays_away_and_the_last_one_ends_the_run() -> None:
    async def phase() -> None:
        player, group, workers, _, said = player_of(2, 0)
        playing = [asyncio.create_task(player.play(PROMPT, i, str(i))) for i in range(20)]
        await asyncio.sleep(0.5)
        group.actors[0].die()
        assert len(await asyncio.gather(*playing)) == 20
        assert "no restart is left (rollout.restarts)" in said[-1]
        group.actors[1].die()
        with pytest.raises(ActorFailed, match=r"rollout-1 .*its process died .*rollout-1\.log"):
            await player.play(PROMPT, 0, "0")
        workers.close()

    with VirtualLoop() as loop:
        loop.run(phase())


def test_one_that_is_abandoned_is_over_when_its_environment_is_closed() -> None:
    async def phase() -> None:
        player, group, workers, _, _ = player_of(1, 0)
        playing = asyncio.create_task(player.play(PROMPT, 0, "0"))
        await asyncio.sleep(0.5)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        assert all(task.done() for task in group.actors[0].tasks.values())
        player.close()
        await asyncio.sleep(0.1)
        assert group.actors[0].ended == 1
        workers.close()

    with VirtualLoop() as loop:
        loop.run(phase())


def test_what_workers_find_of_engines_reaches_the_driver() -> None:
    """Their shares of a cache, one that is dead, one that rests, and that none is left."""

    async def phase() -> None:
        player, group, workers, engines, _ = player_of(2, 0)
        playing = asyncio.create_task(player.play(PROMPT, 0, "0"))
        await asyncio.sleep(0.5)
        worker = group.actors[0]
        assert worker.engines[0].facts == [Facts(cache_tokens=500, cache_bytes=1), None]
        worker.said.put_nowait(EngineDead(0, "one that was there before", "died"))
        worker.said.put_nowait(EngineRests(0, -1))  # from before a sync
        worker.said.put_nowait(EngineRests(1, 0))
        await asyncio.sleep(0.1)
        assert (engines.serving, player.resting) == ([0, 1], {1})
        worker.said.put_nowait(EngineDead(0, "e0", "died"))
        await asyncio.sleep(0.1)
        assert engines.serving == [1]
        player.rejoin()
        await asyncio.sleep(0.1)
        assert (worker.engines[-1].serving, worker.engines[-1].syncs, player.resting) == ([1], 1, set())
        await playing
        failing = asyncio.create_task(player.play(PROMPT, 1, "1"))
        await asyncio.sleep(0.1)
        engines.serving = []
        key = max(worker.tasks, default=-1) if worker.names[-1] == "1" else max(group.actors[1].tasks)
        of = worker if worker.names[-1] == "1" else group.actors[1]
        of.said.put_nowait(Failed(key, True, "engine", 0, "service", "none is left"))
        with pytest.raises(NobodyServes, match="all are dead"):
            await failing
        engines.serving = [1]
        ending = asyncio.create_task(player.play(PROMPT, 2, "2"))
        await asyncio.sleep(0.1)
        worker.said.put_nowait(EngineDead(1, "e1", "died too"))
        with pytest.raises(ActorFailed, match="died too"):
            await ending
        workers.close()

    with VirtualLoop() as loop:
        loop.run(phase())


def test_a_defect_of_ours_is_told_to_all_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def hear(line: object, news: object) -> None:
        raise KeyError("a defect")

    async def phase() -> None:
        player, _, workers, _, _ = player_of(2, 0)
        monkeypatch.setattr(player, "_hear", hear)
        playing = [asyncio.create_task(player.play(PROMPT, i, str(i))) for i in range(6)]
        for outcome in await asyncio.gather(*playing, return_exceptions=True):
            assert isinstance(outcome, ActorFailed) and "a defect" in str(outcome)
        workers.close()

    with VirtualLoop() as loop:
        loop.run(phase())


def test_a_loop_that_ends_waits_until_environments_are_closed() -> None:
    """As a service's does: everything in it is cancelled at once."""
    closed: list[int] = []

    async def phase() -> None:
        player, group, workers, _, _ = player_of(1, 0)

        async def end(session: str) -> Taken:
            await asyncio.sleep(5)
            closed.append(len(group.actors[0].tasks))
            return Timeline().take()

        group.actors[0].end = SimpleNamespace(remote=group.actors[0]._called(end))
        playing = [asyncio.create_task(player.play(PROMPT, i, str(i))) for i in range(3)]
        await asyncio.sleep(0.5)
        left = [task for task in asyncio.all_tasks() if task in {*playing, player.lines[0].listening}]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        assert closed == [3]
        workers.close()

    with VirtualLoop() as loop:
        loop.run(phase())


def test_what_is_abandoned_before_a_worker_has_begun_waits_for_nobody() -> None:
    async def phase() -> None:
        player, group, workers, _, _ = player_of(1, 0)
        group.actors[0].begin = SimpleNamespace(remote=lambda *_: asyncio.ensure_future(asyncio.sleep(30)))
        playing = asyncio.create_task(player.play(PROMPT, 0, "0"))
        await asyncio.sleep(0.1)
        now = asyncio.get_running_loop().time
        start = now()
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
        assert now() - start < 1
        player.close()
        workers.close()

    with VirtualLoop() as loop:
        loop.run(phase())


def test_orders_that_a_worker_cannot_read_end_the_run() -> None:
    async def refuse(*_: object) -> None:
        raise ray.exceptions.RayTaskError("play", "it does not unpickle", ValueError("it does not unpickle"))

    async def phase() -> None:
        player, group, workers, _, _ = player_of(1, 0)
        group.actors[0].play = SimpleNamespace(remote=lambda *of: asyncio.ensure_future(refuse(*of)))
        with pytest.raises(ActorFailed, match="it does not unpickle"):
            await player.play(PROMPT, 0, "0")
        player.close()
        workers.close()

    with VirtualLoop() as loop:
        loop.run(phase())
