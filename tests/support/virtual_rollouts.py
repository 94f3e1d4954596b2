"""Engines and players in virtual time, around the real service, router and admission.

All random numbers come from a single generator in the order of events, in a single thread: a seed determines the
schedule.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass, field
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

import ray.exceptions

from skyrl_mega.cluster.errors import ActorFailed, describe
from skyrl_mega.cluster.fleet import NoServingActor
from skyrl_mega.engines.base import Completion, EngineDied, Request, Sampling
from skyrl_mega.engines.presence import NotReady
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.rollout.gate import Start
from skyrl_mega.rollout.routing.router import Router
from skyrl_mega.rollout.service import RolloutService
from skyrl_mega.simulation.virtual_time import VirtualLoop
from skyrl_mega.trajectories.trajectory import Status, Trajectory


@dataclass
class Engine:
    """An engine that gives each request a token every `token_s`, unless paused; it may crash and recover."""

    number: int
    token_s: float
    version: int = 0
    half: bool = False
    """True while an update is incomplete."""
    alive: bool = True
    calls: dict[asyncio.Task[Any], int] = field(default_factory=dict)
    running: asyncio.Event = field(default_factory=asyncio.Event)

    def actor(self) -> Any:
        """Returns a handle of the current process."""
        remote = partial(self.stream, SimpleNamespace(engine=self))
        return SimpleNamespace(generate_many=SimpleNamespace(options=lambda **_: SimpleNamespace(remote=remote)))

    async def stream(self, life: Any, requests: list[Request], _: Sampling) -> AsyncIterator[Awaitable[Any]]:
        """Streams like `generate_many` of an actor: a message per finished request."""
        if self.half:
            raise ray.exceptions.RayTaskError("generate_many", "", NotReady("half of an update has come"))
        if not self.alive:
            raise ray.exceptions.RayActorError
        left = {asyncio.create_task(self._generate(request)): i for i, request in enumerate(requests)}
        self.calls.update(left)
        try:
            while left:
                ended, _ = await asyncio.wait(left, return_when="FIRST_COMPLETED")
                for task in sorted(ended, key=left.__getitem__):
                    del left[task]
                    if task.cancelled():
                        raise ray.exceptions.RayTaskError("generate_many", "", EngineDied("killed"))
                    yield answer([task.result()])
        finally:
            for task in left:
                task.cancel()

    async def _generate(self, request: Request) -> Completion:
        count = Random(request.seed).randint(1, request.max_tokens)
        versions: list[tuple[int, int]] = []
        for at in range(count):
            await asyncio.sleep(self.token_s)
            await self.running.wait()
            if not versions or versions[-1][0] != self.version:
                versions.append((self.version, at))
        return Completion(request.id, [7] * count, [-1.0] * count, "stop", tuple(versions))


async def answer(completions: list[Completion]) -> list[Completion]:
    return completions


class Engines:
    """The parts of a `Fleet` used by a router, and the effects of a sync.

    Args:
        count: Number of engines.
        random: Generator of all random events.
        restarts: Number of crashes allowed.
    """

    def __init__(self, count: int, random: Random, restarts: int = 10**6) -> None:
        self.engines = [Engine(i, random.choice([0.5, 1.0, 3.0])) for i in range(count)]
        self.random, self.restarts = random, restarts
        self.up = {*range(count)}
        """Engines with current weights."""
        self.facts: list[Any] = [None] * count
        self.group = SimpleNamespace(actors=[engine.actor() for engine in self.engines], name="engine")

    @property
    def serving(self) -> list[int]:
        return sorted(self.up)

    def ask(self, method: str, timeout: float) -> None:
        self.check()

    def check(self) -> None:
        if not self.up:
            raise NoServingActor("engine", 0, "service", "all are dead")

    def retire(self, rank: int, error: BaseException | str) -> None:
        if rank not in self.up:
            return
        if not self.restarts:
            raise ActorFailed("engine", rank, "service", describe(error))
        self.restarts -= 1
        self.up.discard(rank)

    def kill(self, rank: int) -> None:
        self.engines[rank].alive = False
        for task in self.engines[rank].calls:
            task.cancel()

    def revive(self, version: int) -> None:
        """Syncs: restarts crashed engines and updates all."""
        for rank, engine in enumerate(self.engines):
            if not engine.alive:
                self.up.discard(rank)
                self.engines[rank] = Engine(rank, engine.token_s)
                self.group.actors[rank] = self.engines[rank].actor()
            self.engines[rank].version = version
            self.engines[rank].half = False
            self.engines[rank].running.set()
            self.up.add(rank)

    def hold(self, half: bool) -> None:
        """Pauses all engines for an update; with `half`, half-updated engines refuse requests until the next sync."""
        for engine in self.engines:
            engine.half = half
            engine.running.clear()


class Player:
    """A player of trajectories of one to four turns, with tools of random duration."""

    def __init__(self, router: Router, random: Random) -> None:
        self.router, self.random = router, random

    async def open(self, prompt: Prompt) -> None:
        await asyncio.sleep(self.random.random())

    async def play(self, prompt: Prompt, sample: int, name: str, start: Start | None = None) -> Trajectory:
        await self.open(prompt)
        if start is not None:
            await start()
        t = Trajectory(
            prompt, sample, array("i", [1, 2]), array("b", [0, 0]), array("f", [0.0, 0.0]), 2, 0.0,
            Status.COMPLETED, 0,
        )  # fmt: skip
        t.metadata["name"] = name
        random = Random(name)
        for turn in range(random.randint(1, 4)):
            request = Request(f"{name}/{turn}", list(t.tokens), 6, random.getrandbits(30))
            completion = await self.router.generate(request)
            t.versions += [(version, len(t.tokens) + at) for version, at in completion.versions]
            t.tokens.extend(completion.tokens)
            t.mask.extend([1] * len(completion.tokens))
            t.logprobs.extend(completion.logprobs)
            await asyncio.sleep(self.random.choice([0.0, 1.0, 1.0, 40.0]))
        t.turns, t.reward = turn + 1, float(random.random() < 0.5)
        return t


def service_of(engines: Any, random: Random, loop: VirtualLoop) -> RolloutService:
    """Returns a service on these engines."""
    player = Player(Router(engines, Sampling(), 4, 600.0, service=True), random)
    return RolloutService(player, engines, loop, timeout_s=60.0)
