"""Requests spread over engines, each to the least loaded or to the one that knows its beginning (`homes`); what a
failed engine had goes to the others.

A request waits here or in an engine for as long as those before it need. No time limit counts that; what is bounded is
how long an engine may give no sign of life (`engine.Engine.generate_many`).
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from skyrl_mega.cluster.errors import ActorFailed
from skyrl_mega.cluster.group import cause_of, describe
from skyrl_mega.config.derived import CACHE_FILL
from skyrl_mega.engines.base import Completion, EngineDied, Facts, Request, Sampling
from skyrl_mega.engines.presence import NotReady
from skyrl_mega.rollout.homes import Homes

IN_FLIGHT = 4
"""An engine is given so many times the sequences that it runs at once: it is never idle, and the rest goes where room
is first. What its cache holds bounds it too (`config.derived.CACHE_FILL`)."""
MARGIN_S = 30.0
"""An engine finds within `rollout.request_timeout_s` that its vLLM stands still; one whose actor gives no sign of life
for so much longer does not answer at all."""


@dataclass(eq=False)
class Waiting:
    """A request, and who waits for its answer."""

    request: Request
    answer: asyncio.Future[Completion]
    until: float | None = None
    """The loop's time at which its seconds are over."""

    def at(self, now: float) -> Request:
        """The request with the seconds that are left."""
        return self.request if self.until is None else replace(self.request, seconds=max(0.0, self.until - now))

    @property
    def tokens(self) -> int:
        """Its length at most."""
        return len(self.request.tokens) + self.request.max_tokens


@dataclass(eq=False)
class Load:
    """What an engine has been given."""

    room: float
    """Tokens that it may be given."""
    requests: int = 0
    tokens: int = 0

    def fits(self, waiting: Waiting, limit: int) -> bool:
        """Whether it may take this one; alone, any."""
        return self.requests < limit and (not self.requests or self.tokens + waiting.tokens <= self.room)

    def add(self, waiting: Waiting, times: int = 1) -> None:
        """Takes it, or with -1 gives it back."""
        self.requests += times
        self.tokens += times * waiting.tokens


class EngineGroup(Protocol):
    """Engines by rank."""

    name: str
    actors: list[Any]


class Engines(Protocol):
    """Who may be asked: the driver's `Fleet`, or what another process knows of it."""

    @property
    def group(self) -> EngineGroup:
        """All of them."""

    @property
    def facts(self) -> Sequence[Facts | None]:
        """By rank."""

    @property
    def serving(self) -> Sequence[int]:
        """Ranks that may be asked."""

    def retire(self, rank: int, cause: str) -> None:
        """One has failed.

        Raises:
            ActorFailed: No more may be started again.
        """

    def check(self) -> None:
        """Raises NobodyServes where that is so."""


class Router:
    """Routes the requests of one generation phase. Lives in one event loop.

    Requests that are submitted in the same turn of the event loop travel in one message per engine, so that a batch
    of short requests costs few calls. Requests of an engine that dies or falls silent are sent to the engines that are
    left; their seeds are their own, so they are drawn as they would have been.

    Args:
        fleet: The engines; those that serve are asked.
        sampling: How all requests are drawn.
        concurrency: Sequences that one engine runs at once.
        timeout_s: Seconds in which an engine finds that it stands still (`rollout.request_timeout_s`).
    """

    count: Callable[[int, int], None] = staticmethod(lambda engine, change: None)
    """Told of an engine's requests: so many more, or fewer, are under way (`telemetry.timeline`)."""

    def __init__(self, fleet: Engines, sampling: Sampling, concurrency: int, timeout_s: float) -> None:
        self.fleet, self.sampling, self.timeout_s = fleet, sampling, timeout_s
        self.limit = IN_FLIGHT * concurrency
        self.load = {engine: load_of(fleet.facts[engine]) for engine in fleet.serving}
        self.homes = Homes()
        self.queue: deque[Waiting] = deque()
        self.names: set[str] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.scheduled = False
        self.serving = frozenset(fleet.serving)
        self.rejoins = 0
        """How often engines have come back (`rollout.service`)."""

    async def generate(self, request: Request) -> Completion:
        """Continues one prompt.

        Raises:
            NobodyServes: No engine is left.
            ActorFailed: The engine refused the request; the cause names it.
            ValueError: Another request that has no answer yet has the same id.
        """
        if request.id in self.names:
            raise ValueError(f"two requests at once are called {request.id}")
        self.names.add(request.id)
        loop = asyncio.get_running_loop()
        waiting = Waiting(request, loop.create_future())
        self.queue.append(waiting)
        timer: asyncio.TimerHandle | None = None
        if request.seconds is not None:
            waiting.until = loop.time() + request.seconds
            timer = loop.call_at(waiting.until, self._expire, waiting)
        self._schedule()
        try:
            return await waiting.answer
        finally:
            self.names.discard(request.id)
            if timer is not None:
                timer.cancel()  # the loop outlives the phase, and would keep the request as long

    def expect(self, players: int) -> None:
        """So many trajectories are about to ask. Here nobody waits for the others."""

    def leave(self) -> None:
        """One of them has ended."""

    def _schedule(self) -> None:
        if not self.scheduled:
            self.scheduled = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _expire(self, waiting: Waiting) -> None:
        """The time of a request is over. An engine that has it ends it; one that still waits ends here."""
        if waiting in self.queue:
            self.queue.remove(waiting)
            if not waiting.answer.done():
                waiting.answer.set_result(Completion(waiting.request.id, [], [], "timeout", ()))

    def _dispatch(self) -> None:
        """Hands out what fits."""
        self.scheduled = False
        self.serving = frozenset(self.fleet.serving)  # another router may have found that one is dead
        parts: dict[int, dict[str, Waiting]] = {engine: {} for engine in self.load}
        while self.queue:
            fits = [engine for engine, load in self.load.items() if load.fits(self.queue[0], self.limit)]
            free = [engine for engine in fits if self._takes(engine)]
            if not free:
                break
            requests = {engine: self.load[engine].requests for engine in free}
            engine = self.homes.choose(self.queue[0].request, requests)
            waiting = self.queue.popleft()
            parts[engine][waiting.request.id] = waiting
            self.load[engine].add(waiting)
        self._send(parts)
        if self.queue and self.serving.isdisjoint(self.load):  # another has found that the last one is dead
            try:
                self.fleet.check()
            except ActorFailed as error:
                self._nobody({}, error)

    def _takes(self, engine: int) -> bool:
        """Whether an engine is up to date."""
        return engine in self.serving

    def close(self) -> None:
        """Nobody waits for what is under way any more."""
        for task in self.tasks:
            task.cancel()

    def _send(self, parts: dict[int, dict[str, Waiting]]) -> None:
        """A message for every engine that has been given something."""
        for engine, part in parts.items():
            if part:
                task = asyncio.create_task(self._run(engine, part))
                self.tasks.add(task)
                task.add_done_callback(partial(self._ended, part))

    def _ended(self, part: dict[str, Waiting], task: asyncio.Task[None]) -> None:
        """Whatever ends a task is told to those who wait for it: an error of our own would else be a wait for ever."""
        self.tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._fail(part, error)

    async def _run(self, engine: int, part: dict[str, Waiting]) -> None:
        import ray

        silence = self.timeout_s + MARGIN_S
        now = asyncio.get_running_loop().time()
        actor, load, began = self.fleet.group.actors[engine], self.load.get(engine), self.rejoins
        self.count(engine, len(part))
        try:
            method = actor.generate_many.options(num_returns="streaming")
            stream = method.remote([w.at(now) for w in part.values()], self.sampling)
            # Read to its end: an engine is through with a wave only when the wave's generator is.
            async for reference in _bounded(stream, silence):
                ended = await asyncio.wait_for(reference, silence)
                self.count(engine, -len(ended))
                for completion in ended:
                    waiting = part.pop(completion.id)
                    if load is not None:
                        load.add(waiting, -1)
                    if not waiting.answer.done():
                        waiting.answer.set_result(completion)
                if self.queue:
                    self._schedule()
        except ray.exceptions.RayTaskError as error:
            if isinstance(cause_of(error), EngineDied):
                self._leave(engine, actor, load, part, describe(error))
                return
            if isinstance(cause_of(error), NotReady) and self._postpone(engine, load, part, began):
                return
            # The engine is well: it refused a request.
            name = f"{self.fleet.group.name}-{engine}"
            self._fail(part, ActorFailed(name, engine, "generate_many", describe(error), max(0, len(part) - 1)))
        except ray.exceptions.RayError as error:
            self._leave(engine, actor, load, part, describe(error))
        except TimeoutError:
            self._leave(engine, actor, load, part, f"generate_many: no sign of life within {silence:g} s")
        finally:
            self.count(engine, -len(part))

    def _postpone(self, engine: int, load: Load | None, part: dict[str, Waiting], began: int) -> bool:
        """Whether requests wait for an engine whose weights are not there: in a phase they always are."""
        return False

    def _leave(self, engine: int, actor: Any, load: Load | None, part: dict[str, Waiting], cause: str) -> None:
        """Takes an engine out, unless another is in its place already; its requests go to the others."""
        if self.fleet.group.actors[engine] is not actor:
            self._again(load, part)
            return
        self.load.pop(engine, None)
        try:
            self.fleet.retire(engine, cause)
            self.fleet.check()
        except ActorFailed as error:
            self._nobody(part, error)
            return
        self._again(load, part)

    def _again(self, load: Load | None, part: dict[str, Waiting]) -> None:
        """Requests that an engine was given wait again, before all others."""
        for waiting in part.values():
            if load is not None:
                load.add(waiting, -1)
        self.queue.extendleft(reversed(part.values()))
        self._schedule()

    def _nobody(self, part: dict[str, Waiting], error: ActorFailed) -> None:
        """No engine is left for these, nor for those that wait."""
        self._fail(part, error)
        self._fail({w.request.id: w for w in self.queue}, error)
        self.queue.clear()

    def _fail(self, part: dict[str, Waiting], error: BaseException) -> None:
        for waiting in part.values():
            if not waiting.answer.done():
                waiting.answer.set_exception(error)


def load_of(facts: Facts | None) -> Load:
    """That of an engine which has been given nothing: of tokens it takes what its cache holds, all requests as long as
    they may become."""
    return Load(math.inf if facts is None else CACHE_FILL * facts.cache_tokens)


async def _bounded(stream: Any, seconds: float) -> AsyncIterator[Any]:
    """A stream's items, each of which may take so many seconds; TimeoutError past it."""
    while True:
        try:
            item = await asyncio.wait_for(anext(stream), seconds)
        except StopAsyncIteration:
            return
        yield item


Progress = Callable[[int, int], None]
"""Called with (trajectories done, trajectories in all)."""
