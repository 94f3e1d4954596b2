"""The router from trajectories to engines. Two functions are the strategy: `pick_engine` chooses the engine of a
request (`prefix_affinity`), and `when_to_dispatch` chooses the requests sent now (`at_once` or `lockstep`). Requests of
a failed engine move to other engines.

A request waits here or in an engine for as long as earlier requests need. No time limit covers that wait; the limit is
on the time for which an engine may show no sign of life (`engines.base.Engine.generate_many`).
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from skyrl_mega.cluster.errors import ActorFailed, cause_of, describe
from skyrl_mega.cluster.fleet import NoServingActor
from skyrl_mega.config.derived import CACHE_FILL
from skyrl_mega.engines.base import Completion, EngineDied, Facts, Request, Sampling
from skyrl_mega.engines.prefix_affinity import PrefixAffinity
from skyrl_mega.engines.presence import NotReady
from skyrl_mega.rollout.journal import Journal, RecordedTurn

IN_FLIGHT = 4
"""Requests given to an engine, as a multiple of the sequences running at once. So the engine is never idle, and the
rest goes to the first engine with capacity. The cache is a second limit (`config.derived.CACHE_FILL`)."""
MARGIN_S = 30.0
"""Extra seconds before an engine's actor counts as dead. The engine itself detects a stuck vLLM within
`rollout.request_timeout_s`."""


@dataclass(eq=False)
class QueuedRequest:
    """A request that waits for an engine, with the `asyncio.Future` of its answer."""

    request: Request
    answer: asyncio.Future[Completion]
    until: float | None = None
    """Event-loop time at which the request's time limit ends."""

    def at(self, now: float) -> Request:
        """Returns the request with `seconds` set to the rest of its time limit at the event loop's time `now`, at least
        0. A request without a limit is returned unchanged."""
        return self.request if self.until is None else replace(self.request, seconds=max(0.0, self.until - now))

    @property
    def max_length(self) -> int:
        """Upper limit of the sequence's length: the number of given tokens plus `max_tokens`."""
        return len(self.request.tokens) + self.request.max_tokens


@dataclass(eq=False)
class EngineLoad:
    """The number and the tokens of an engine's requests in progress."""

    room: float
    """Most tokens given to the engine at once, `sequence_tokens` of every request included."""
    sequence_tokens: int = 0
    """`engines.base.Facts.sequence_tokens` of the engine."""
    requests: int = 0
    """Number of requests given to the engine."""
    tokens: int = 0
    """Sum of the requests' `QueuedRequest.max_length`, each with `sequence_tokens` more."""

    def fits(self, waiting: QueuedRequest, limit: float) -> bool:
        """Returns True if the engine may take the request, with at most `limit` requests at once. An idle engine takes
        any request."""
        needed = waiting.max_length + self.sequence_tokens
        return self.requests < limit and (not self.requests or self.tokens + needed <= self.room)

    def add(self, waiting: QueuedRequest, times: int = 1) -> None:
        """Adds a request's count and tokens to the load, or subtracts both with `times=-1`."""
        self.requests += times
        self.tokens += times * (waiting.max_length + self.sequence_tokens)


class EngineGroup(Protocol):
    """Engine actors by rank."""

    name: str
    """Name of the group in errors, `engine`."""
    actors: list[Any]
    """Ray's handles of the actors, by rank."""


class Engines(Protocol):
    """The engines available to a router: the driver's `Fleet`, or a rollout worker's view of the fleet."""

    @property
    def group(self) -> EngineGroup:
        """All engines."""

    @property
    def facts(self) -> Sequence[Facts | None]:
        """Measurements of each engine's start (`engines.base.Facts`: its KV cache), by rank; None before its start."""

    @property
    def serving(self) -> Sequence[int]:
        """Ranks of engines that accept requests."""

    def retire(self, rank: int, error: BaseException | str) -> None:
        """Takes a failed engine out of service and requests a restart, without waiting; does nothing if the engine is
        out of service already.

        Args:
            rank: The engine's rank.
            cause: Description of the failure, for the message.

        Raises:
            ActorFailed: The restart budget is used up.
        """

    def check(self) -> None:
        """Raises NoServingActor if no engine is in service."""


PickEngine = Callable[[Request, Mapping[int, int]], int]
"""Returns the engine for a request, given engine → number of requests for each engine with capacity."""
WhenToDispatch = Callable[[deque[QueuedRequest], int, bool], deque[QueuedRequest]]
"""Returns the requests to send now, in order; none means to wait for more. Arguments: the queue, the number of running
trajectories, and True if an engine has requests."""


def at_once(queue: deque[QueuedRequest], running: int, busy: bool) -> deque[QueuedRequest]:
    """Returns the whole queue: each request is sent as soon as an engine has capacity (`WhenToDispatch`).

    Args:
        queue: The queued requests.
        running: Not used.
        busy: Not used.
    """
    return queue


class Router:
    """A router for the requests of a phase or a service. Lives in a single event loop.

    Requests submitted in the same turn of the event loop travel in a single message per engine, so a batch of short
    requests costs few calls. If an engine dies or stops responding, the remaining engines take over the requests. Each
    request is seeded separately, so the sampled tokens do not depend on the engine.

    Args:
        fleet: The engines; only engines in service receive requests.
        sampling: Sampling parameters of all requests.
        concurrency: Sequences running at once in an engine; None sends requests without regard to capacity.
        timeout_s: Seconds for an engine to detect a stuck vLLM (`rollout.request_timeout_s`).
        pick_engine: Chooses the engine of a request; None uses prefix affinity.
        when_to_dispatch: Chooses the requests to send now.
        service: True for a service (`rollout.service`), which lasts as long as the run. Requests without an engine wait
            for `rejoin` instead of failing, and answers are recorded in `journal`.
        mark: Suffix of the requests' names at the engines, if other processes may use the same names.
    """

    count: Callable[[int, int], None] = staticmethod(lambda engine, change: None)
    """Receives changes of an engine's number of requests in progress (`telemetry.timeline`)."""
    on_refusal: Callable[[int], None] = staticmethod(lambda engine: None)
    """Receives the rank of an engine added to `awaiting_sync`."""

    def __init__(
        self,
        fleet: Engines,
        sampling: Sampling,
        concurrency: int | None,
        timeout_s: float,
        *,
        pick_engine: PickEngine | None = None,
        when_to_dispatch: WhenToDispatch = at_once,
        service: bool = False,
        mark: str = "",
    ) -> None:
        self.fleet, self.sampling, self.timeout_s = fleet, sampling, timeout_s
        self.pick_engine = pick_engine or PrefixAffinity().choose
        self.when_to_dispatch, self.service, self.mark = when_to_dispatch, service, mark
        self.limit = math.inf if concurrency is None else IN_FLIGHT * concurrency
        self.load = {engine: self._new_load(engine) for engine in fleet.serving}
        self.queue: deque[QueuedRequest] = deque()
        self.names: set[str] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.scheduled = False
        self.serving = frozenset(fleet.serving)
        self.running = 0
        """Running trajectories, each with at most one request."""
        self.journal = Journal()
        """Recorded turns of unfinished trajectories, in a service."""
        self.awaiting_sync: set[int] = set()
        """Ranks of engines that refused a request; cleared by the next weight sync. Always empty in a phase."""
        self.rejoins = 0
        """Number of times engines came back into service."""

    async def generate(self, request: Request) -> Completion:
        """Sends a request to an engine and returns the completion, or returns the recorded answer to the same request
        at once. Waits for a free engine; a service also waits for a restarted one. After the request's time limit the
        completion's finish is `timeout`, with the tokens so far, perhaps none.

        Raises:
            NoServingActor: No engine is left, in a phase.
            ActorFailed: The engine refused the request, or the restart budget is used up; the error names the cause.
            ValueError: Another unanswered request has the same id.
        """
        if (known := self.journal.answer(request)) is not None:
            return known
        marked = replace(request, id=request.id + self.mark) if self.mark else request
        completion = await self._answer(marked)
        if self.service:
            self.journal.keep(request, completion)
        return completion

    async def _answer(self, request: Request) -> Completion:
        """Queues a request and waits for the answer of an engine."""
        if request.id in self.names:
            raise ValueError(f"a request with the id {request.id} is in progress already")
        self.names.add(request.id)
        loop = asyncio.get_running_loop()
        waiting = QueuedRequest(request, loop.create_future())
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
                timer.cancel()  # the loop outlives the phase and would keep the request alive

    def expect(self, trajectories: int) -> None:
        """Announces this number of trajectories, in addition to earlier ones, before they send requests.

        Only lockstep (`rollout.routing.lockstep`) needs the number: at each turn, requests leave once every announced
        trajectory sent a request or ended (`leave`).
        """
        self.running += trajectories

    def leave(self) -> None:
        """Reports the end of a trajectory announced by `expect`, also of a failed or cancelled one, so that in lockstep
        the requests of the others need not wait for it."""
        self.running -= 1
        self._schedule()

    async def write_turns(self, folder: Path) -> list[RecordedTurn]:
        """Returns the recorded turns of unfinished trajectories. Writes nothing to `folder`, unlike `WorkerClient`."""
        return self.journal.all()

    def rejoin(self) -> None:
        """Lets all engines that serve after a weight sync take requests again, restarted and joined engines included,
        and continues sending requests. Forgets engines that left. Does not wait."""
        self.awaiting_sync.clear()
        self.rejoins += 1
        serving = [*self.fleet.serving]
        self.load = {engine: load for engine, load in self.load.items() if engine in serving or load.requests}
        for engine in serving:
            if engine not in self.load:
                self.load[engine] = self._new_load(engine)
        self._schedule()

    def close(self) -> None:
        """Cancels all requests in progress at the engines, without waiting. Callers of `generate` get no answer and no
        error, so callers must be cancelled, too."""
        for task in self.tasks:
            task.cancel()

    def _new_load(self, engine: int) -> EngineLoad:
        """Returns the load of an engine without requests. The token limit comes from the cache size, as if every
        request grew to the largest length."""
        facts = None if math.isinf(self.limit) else self.fleet.facts[engine]
        return (
            EngineLoad(math.inf)
            if facts is None
            else EngineLoad(CACHE_FILL * facts.cache_tokens, facts.sequence_tokens)
        )

    def _schedule(self) -> None:
        if not self.scheduled:
            self.scheduled = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _expire(self, waiting: QueuedRequest) -> None:
        """Ends a waiting request after the time limit. Running requests are ended by the engine."""
        if waiting in self.queue:
            self.queue.remove(waiting)
            if not waiting.answer.done():
                waiting.answer.set_result(Completion(waiting.request.id, [], [], "timeout", ()))

    def _dispatch(self) -> None:
        """Assigns waiting requests to engines, as many as fit, and sends the messages."""
        self.scheduled = False
        self.serving = frozenset(self.fleet.serving)  # another router may have found a dead engine
        batches: dict[int, dict[str, QueuedRequest]] = {engine: {} for engine in self.load}
        if ready := self.when_to_dispatch(self.queue, self.running, bool(self.tasks)):
            self.queue = ready
        while ready:
            fits = [engine for engine, load in self.load.items() if load.fits(ready[0], self.limit)]
            free = {e: self.load[e].requests for e in fits if e in self.serving and e not in self.awaiting_sync}
            if not free:
                break
            engine = self.pick_engine(ready[0].request, free)
            waiting = ready.popleft()
            batches[engine][waiting.request.id] = waiting
            self.load[engine].add(waiting)
        self._send(batches)
        if self.queue and self.serving.isdisjoint(self.load):  # another router found the last engine dead
            try:
                self.fleet.check()
            except ActorFailed as error:
                self._fail_all({}, error)

    def _send(self, batches: dict[int, dict[str, QueuedRequest]]) -> None:
        """Sends a message to every engine with new requests."""
        for engine, batch in batches.items():
            if batch:
                task = asyncio.create_task(self._run(engine, batch))
                self.tasks.add(task)
                task.add_done_callback(partial(self._ended, batch))

    def _ended(self, batch: dict[str, QueuedRequest], task: asyncio.Task[None]) -> None:
        """Raises the error of a failed send task in all its requests. Without this, a bug in our code would leave
        callers waiting forever."""
        self.tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._fail(batch, error)
        if self.queue:
            self._schedule()

    async def _run(self, engine: int, batch: dict[str, QueuedRequest]) -> None:
        import ray

        silence = self.timeout_s + MARGIN_S
        now = asyncio.get_running_loop().time()
        actor, load, began = self.fleet.group.actors[engine], self.load.get(engine), self.rejoins
        self.count(engine, len(batch))
        try:
            method = actor.generate_many.options(num_returns="streaming")
            stream = method.remote([w.at(now) for w in batch.values()], self.sampling)
            # Read to its end: an engine has finished a wave only when the wave's generator is exhausted.
            async for reference in _bounded(stream, silence):
                ended = await asyncio.wait_for(reference, silence)
                self.count(engine, -len(ended))
                for completion in ended:
                    waiting = batch.pop(completion.id)
                    if load is not None:
                        load.add(waiting, -1)
                    if not waiting.answer.done():
                        waiting.answer.set_result(completion)
                if self.queue:
                    self._schedule()
        except ray.exceptions.RayTaskError as error:
            if isinstance(cause_of(error), EngineDied):
                self._retire(engine, actor, load, batch, error)
                return
            if isinstance(cause_of(error), NotReady) and self.service:  # in a phase the weights are always current
                self._postpone(engine, load, batch, began)
                return
            # The engine is healthy: it refused a request.
            others, group = max(0, len(batch) - 1), self.fleet.group.name
            self._fail(batch, ActorFailed(group, engine, "generate_many", describe(error), others=others))
        except ray.exceptions.RayError as error:
            self._retire(engine, actor, load, batch, error)
        except TimeoutError:
            self._retire(engine, actor, load, batch, f"generate_many: no sign of life within {silence:g} s")
        finally:
            self.count(engine, -len(batch))

    def _postpone(self, engine: int, load: EngineLoad | None, batch: dict[str, QueuedRequest], began: int) -> None:
        """Queues the requests of an engine whose weights are only partly updated. The weight sync with the rest calls
        `rejoin`, or did so since the request was sent."""
        if began == self.rejoins:
            self.awaiting_sync.add(engine)
        self._requeue(load, batch)
        if engine in self.awaiting_sync:
            self.on_refusal(engine)

    def _retire(
        self, engine: int, actor: Any, load: EngineLoad | None, batch: dict[str, QueuedRequest], error: Exception | str
    ) -> None:
        """Takes an engine out of service, unless another actor already took the rank. The requests move to other
        engines."""
        if self.fleet.group.actors[engine] is not actor:
            self._requeue(load, batch)
            return
        self.load.pop(engine, None)
        try:
            self.fleet.retire(engine, error)
            self.fleet.check()
        except ActorFailed as failure:
            self._fail_all(batch, failure)
            return
        self._requeue(load, batch)

    def _requeue(self, load: EngineLoad | None, batch: dict[str, QueuedRequest]) -> None:
        """Puts an engine's requests back at the front of the queue."""
        for waiting in batch.values():
            if load is not None:
                load.add(waiting, -1)
        self.queue.extendleft(reversed(batch.values()))
        self._schedule()

    def _fail_all(self, batch: dict[str, QueuedRequest], error: ActorFailed) -> None:
        """Raises the error in these and all waiting requests, as no engine is left. A service queues the requests if an
        engine can restart."""
        if self.service and isinstance(error, NoServingActor):
            self.queue.extendleft(reversed(batch.values()))
            return
        self._fail(batch, error)
        self._fail({w.request.id: w for w in self.queue}, error)
        self.queue.clear()

    def _fail(self, batch: dict[str, QueuedRequest], error: BaseException) -> None:
        for waiting in batch.values():
            if not waiting.answer.done():
                waiting.answer.set_exception(error)


async def _bounded(stream: Any, seconds: float) -> AsyncIterator[Any]:
    """Yields the items of a stream. Raises TimeoutError if an item takes more than `seconds`."""
    while True:
        try:
            item = await asyncio.wait_for(anext(stream), seconds)
        except StopAsyncIteration:
            return
        yield item
