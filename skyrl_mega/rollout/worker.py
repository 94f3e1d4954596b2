"""A process that plays trajectories for the driver: environments, agent loop and requests to engines are all here.

The driver sends orders and asks for news, many of either in one message. A session is one phase, or a service that
goes on while weights change: each has a router of its own, as in the driver.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from secrets import token_hex
from typing import Any

from skyrl_mega.cluster.errors import ActorFailed
from skyrl_mega.cluster.fleet import NobodyServes
from skyrl_mega.cluster.group import describe
from skyrl_mega.config.schema import EnvironmentConfig, RolloutConfig, SamplingConfig
from skyrl_mega.engines.base import Completion, Request
from skyrl_mega.envs import registry
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.envs.sandbox import budget
from skyrl_mega.megatron.parts import Stored
from skyrl_mega.rollout import journal
from skyrl_mega.rollout.by_reference import put_away
from skyrl_mega.rollout.env_pool import EnvPool
from skyrl_mega.rollout.equipment import Equipment
from skyrl_mega.rollout.journal import Journal
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
from skyrl_mega.rollout.renderer import Renderer
from skyrl_mega.rollout.router import Load, Router, Waiting
from skyrl_mega.rollout.service import ServiceRouter
from skyrl_mega.telemetry.timeline import Taken, Timeline
from skyrl_mega.telemetry.trace import Span

BEAT_S = 1.0
"""A worker without news says so after that time, and what it has under way."""
COUNTS_S = 0.5
"""What it had under way is told no more often."""
COALESCE_S = 0.02
"""News that come so soon after one another travel together."""
ELSEWHERE = Prompt(-1, [], "", {})
"""Stands for a prompt that the driver has."""


class RolloutWorker:
    """Plays trajectories in a process of its own.

    Args:
        model: Directory of the model, for its tokenizer and template.
        rollout: The run's settings; `concurrency` is this worker's share.
        environments: The run's settings; `workers` is this worker's share.
        reward_weights: `algorithm.reward_weights`.
        secrets: Variables of the driver's environment that environments read.
        beside: Workers that share this node's memory.
    """

    def __init__(
        self,
        *,
        model: str,
        rollout: RolloutConfig,
        environments: EnvironmentConfig,
        reward_weights: Mapping[str, float],
        secrets: Mapping[str, str],
        beside: int,
    ) -> None:
        os.environ |= secrets
        budget.divide(beside)
        for name in environments.classes:  # here, as importing is not to count as a trajectory's time
            registry.resolve(name, environments)
        self.timeline, self.counted = Timeline(), time.monotonic()
        chat, threads = Renderer(model, rollout), EnvPool(environments.workers, self.timeline.calls)
        self.equipment = Equipment(chat, rollout, environments, reward_weights, threads)
        self.sessions: dict[str, Session] = {}
        self.told = 0
        """Programs that were ended for memory, as far as the driver knows."""
        self.told_of_sandboxes = False
        """Whether it knows that there are any."""

    async def begin(self, session: str, sampling: SamplingConfig, service: bool, engines: EnginesNow) -> None:
        """Begins a session. `service`: requests that no engine can take wait for one that comes back."""
        begun = self.sessions[session] = Session(self.equipment, sampling, service, engines)
        begun.router.count = self.timeline.requests

    async def play(self, session: str, orders: Sequence[Order]) -> None:
        """Begins to carry out orders; the outcomes are news."""
        for order in orders:
            self.sessions[session].play(order)

    async def abandon(self, session: str, keys: Sequence[int]) -> None:
        """Nobody waits for these any more; that they have ended is news."""
        if (known := self.sessions.get(session)) is not None:  # it may have ended
            for key in keys:
                known.abandon(key)

    async def rejoin(self, session: str, engines: EnginesNow) -> None:
        """A sync has ended: these engines take requests again."""
        self.sessions[session].rejoin(engines)

    async def news(self, session: str) -> list[News]:
        """What has happened since the last call; waits for it a few seconds."""
        news = await self.sessions[session].news()
        if (ended := budget.ended()) is not None and (ended > self.told or not self.told_of_sandboxes):
            news.append(EndedForMemory(ended - self.told))
            self.told, self.told_of_sandboxes = ended, True
        if time.monotonic() - self.counted > COUNTS_S:
            news.append(Counts(self.timeline.take()))
            self.counted = time.monotonic()
        return news

    async def hand_over(self, session: str, keys: Sequence[int]) -> list[Stored | None]:
        """The arrays of orders that were carried out, and None once all of them are there.

        Each is an object of Ray's, in this node's memory, that belongs to the caller and outlives this process.
        """
        return [*map(self.sessions[session].hand_over, keys), None]

    async def write_said(self, session: str, file: Path) -> None:
        """Writes the policy's turns in trajectories that are under way."""
        await asyncio.to_thread(journal.write, file, self.sessions[session].journal.all())

    async def end(self, session: str) -> Taken:
        """Ends what is under way; its environments are closed when this returns. Returns what was since the last
        `Counts`."""
        if (ended := self.sessions.pop(session, None)) is not None:
            await ended.close()
        return self.timeline.take()


class Session:
    """One phase, or a service, as far as this worker plays it."""

    def __init__(self, equipment: Equipment, sampling: SamplingConfig, service: bool, engines: EnginesNow) -> None:
        self.equipment, self.sampling = equipment, sampling
        self.engines = KnownEngines(engines, self.tell)
        self.agent = equipment.agent(self.engines, sampling, _ServiceRouter if service else _OwnNames)
        self.router = self.agent.router
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.journal = self.router.journal if isinstance(self.router, ServiceRouter) else Journal()
        """Of trajectories that are under way, until they are handed over."""
        self.arrays: dict[int, tuple[str, Stored]] = {}
        """Of orders that were carried out, by key, until they are handed over; with their names."""
        self._abandoned: set[int] = set()
        """Also those that have not come, as calls overtake one another, or that had ended."""
        self._news: list[News] = []
        self._fresh = asyncio.Event()

    def tell(self, news: News) -> None:
        """Keeps it for the driver."""
        self._news.append(news)
        self._fresh.set()

    async def news(self) -> list[News]:
        """What has happened since the last call; waits for it a few seconds."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._fresh.wait(), BEAT_S)
            await asyncio.sleep(COALESCE_S)
        self._fresh.clear()
        found, self._news = self._news, []
        return found

    def play(self, order: Order) -> None:
        """Begins to play, unless it was abandoned before it came."""
        if order.key in self._abandoned:
            self._abandoned.discard(order.key)
            self.tell(Stopped(order.key))
            return
        task = asyncio.create_task(self._play(order))
        self.tasks[order.key] = task
        task.add_done_callback(lambda _: self._ended(order, task))

    def abandon(self, key: int) -> None:
        """Ends one, if it has not ended."""
        if key in self._abandoned:  # cancelled once more, it would no longer wait for its environment to be closed
            return
        self._abandoned.add(key)
        if (task := self.tasks.get(key)) is not None:
            task.cancel()

    def hand_over(self, key: int) -> Stored:
        """The arrays of an order that was carried out, which others have from now on."""
        name, arrays = self.arrays.pop(key)
        self.journal.forget(name)
        return arrays

    def rejoin(self, engines: EnginesNow) -> None:
        """These engines take requests again, unless a later sync has been heard of."""
        if engines.syncs < self.engines.syncs:
            return
        self.engines.know(engines)
        assert isinstance(self.router, ServiceRouter)
        self.router.rejoin()

    async def close(self) -> None:
        """Ends what is under way, and closes its environments."""
        for key in [*self.tasks]:
            self.abandon(key)
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        self.router.close()

    async def _play(self, order: Order) -> None:
        spans: list[Span] | None = [] if order.traced else None
        agent = copy(self.agent)
        agent.spans = lambda: spans
        self.journal.add(order.said)
        if order.fault:
            trajectory = agent.not_played(order.prompt, order.sample, order.fault)
        else:
            trajectory = await agent.play(await agent.open(order.prompt, order.sample), order.name)
        small, arrays = put_away(trajectory)
        small.prompt = ELSEWHERE
        self.arrays[order.key] = order.name, arrays
        self.tell(Played(order.key, small, spans or ()))

    def _ended(self, order: Order, task: asyncio.Task[None]) -> None:
        del self.tasks[order.key]
        self._abandoned.discard(order.key)
        if task.cancelled() or task.exception() is not None:
            self.journal.forget(order.name)
        if task.cancelled():
            self.tell(Stopped(order.key))
        elif (error := task.exception()) is not None:
            self.tell(_failed(order, error))


def _failed(order: Order, error: BaseException) -> Failed:
    if isinstance(error, ActorFailed):
        nobody = isinstance(error, NobodyServes)
        return Failed(order.key, nobody, error.actor, error.rank, error.method, error.cause)
    return Failed(order.key, False, "rollout", 0, "play", describe(error))


@dataclass
class KnownGroup:
    """Engines by rank."""

    name: str
    actors: list[Any]


class KnownEngines:
    """As much of the engines as a router asks. Those that it finds dead are told to the driver, who sees to them."""

    def __init__(self, engines: EnginesNow, tell: Callable[[News], None]) -> None:
        self.tell = tell
        self.group = KnownGroup(engines.name, engines.actors)
        self.know(engines)

    def know(self, engines: EnginesNow) -> None:
        """What the driver knows now. An engine that is the same keeps its handle, by which a router knows it."""
        known = self.group.actors
        self.group.actors = [old if old == new else new for old, new in zip(known, engines.actors, strict=True)]
        self.facts, self.serving, self.syncs = engines.facts, list(engines.serving), engines.syncs

    def retire(self, rank: int, cause: str) -> None:
        """One has failed."""
        if rank in self.serving:
            self.serving.remove(rank)
            self.tell(EngineDead(rank, self.group.actors[rank], cause))

    def check(self) -> None:
        """Raises NobodyServes where that is so."""
        if not self.serving:
            raise NobodyServes(self.group.name, 0, "service", "none is left that this worker knows")


class _OwnNames(Router):
    """A router whose requests have names that no other process gives: one whose worker has died may still be under way
    in an engine when another worker plays the same trajectory."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.mark = token_hex(4)

    async def generate(self, request: Request) -> Completion:
        """Continues one prompt."""
        return await super().generate(replace(request, id=f"{request.id}@{self.mark}"))


class _ServiceRouter(ServiceRouter, _OwnNames):
    """Of a service; tells the driver of engines that wait for a sync. Names in its journal have no mark."""

    fleet: KnownEngines

    def _postpone(self, engine: int, load: Load | None, part: dict[str, Waiting], began: int) -> bool:
        postponed = super()._postpone(engine, load, part, began)
        if engine in self.resting:
            self.fleet.tell(EngineRests(engine, self.fleet.syncs))
        return postponed
