"""Engines in virtual time, as the router sees them: all sequences that one runs get their tokens equally fast, the more
of them the slower, and the rest wait for a place.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from skyrl_mega.engines.base import Completion, Facts, Request, Sampling
from skyrl_mega.simulation.virtual_time import VirtualTime

EXACT = 1e-6
"""Tokens that may be lacking where the clock says that a sequence is done."""


@dataclass(frozen=True)
class Speed:
    """Of one engine.

    Args:
        seconds: Of one token of each sequence, by how many it runs, from 0 to as many as it can.
        prefill_s: Seconds in which it reads one token; nothing is written meanwhile.
        cache_tokens: That it holds, of sequences that run and of those that may go on.
    """

    seconds: tuple[float, ...]
    prefill_s: float
    cache_tokens: float

    @property
    def places(self) -> int:
        """Sequences that it runs at once."""
        return len(self.seconds) - 1


@dataclass(order=True)
class _Sequence:
    end: float
    """The engine's progress at which it is done."""
    number: int
    request: Request = field(compare=False)
    answer: asyncio.Future[Completion] = field(compare=False)
    versions: list[tuple[int, int]] = field(compare=False)

    @property
    def tokens(self) -> int:
        """Of its context and of all that it writes."""
        return len(self.request.tokens) + self.request.max_tokens

    def written(self, progress: float) -> float:
        """Tokens that it has got."""
        return self.request.max_tokens - (self.end - progress)


class SimulatedEngine:
    """One engine.

    It keeps what trajectories have read and written, for their next turns, until other tokens need the place or the
    weights change: from then on all of it is read again, also of what runs.

    Args:
        loop: In virtual time.
        speed: Of it.
    """

    def __init__(self, loop: VirtualTime, speed: Speed) -> None:
        self.loop, self.speed = loop, speed
        self.version, self.paused = 0, False
        self.running: list[_Sequence] = []
        self.waiting: deque[tuple[Request, asyncio.Future[Completion]]] = deque()
        self.cached: OrderedDict[str, int] = OrderedDict()
        """Trajectory → tokens of it that need not be read again; the one longest unused first."""
        self.held = 0
        """Tokens of all that run, at their ends, and of all that are cached."""
        self.progress = 0.0
        """Tokens that each of the running ones has got since its beginning; a later one began with more."""
        self.at = 0.0
        """The time of `progress`. Ahead of the clock while it reads."""
        self.idle = self.filled = 0.0
        """Seconds in which it had no request and was not paused; and how many it ran, times seconds without a pause."""
        self.read = 0
        """Tokens, over all its time."""
        self.seen = 0.0
        self.count = 0
        self.timer: asyncio.TimerHandle | None = None

    def submit(self, request: Request) -> asyncio.Future[Completion]:
        """Takes a request, which writes all the tokens that it may."""
        answer: asyncio.Future[Completion] = self.loop.create_future()
        self._advance()
        self.waiting.append((request, answer))
        self._go_on()
        return answer

    def pause(self) -> None:
        """A sync begins: nothing is written."""
        self._advance()
        self.paused = True

    def resume(self, version: int) -> None:
        """A sync has ended: what runs is read again with the new weights, and what was cached is of no use."""
        self._advance()
        self.paused, self.version = False, version
        self.forget()
        self.at = self.loop.time()
        for sequence in self.running:
            written = int(sequence.written(self.progress) + EXACT)
            sequence.versions.append((version, written))
            self._reads(len(sequence.request.tokens) + written)
        self._go_on()

    def forget(self) -> None:
        """Nothing is cached any more."""
        self.held -= sum(self.cached.values())
        self.cached.clear()

    def measured(self) -> tuple[float, float]:
        """`idle` and `filled` up to now."""
        self._advance()
        return self.idle, self.filled

    def _reads(self, tokens: int) -> None:
        self.read += tokens
        self.at += tokens * self.speed.prefill_s

    def _advance(self) -> None:
        now, running = self.loop.time(), len(self.running)
        if not self.paused:
            self.filled += (now - self.seen) * running
            self.idle += (now - self.seen) * (not running and not self.waiting)
        self.seen = now
        if now > self.at:
            if running and not self.paused:
                self.progress += (now - self.at) / self.speed.seconds[running]
            self.at = now

    def _go_on(self) -> None:
        """Ends what is done, begins what has a place, and sets the clock for the next end."""
        self._advance()
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        if self.paused:
            return
        while self.running and self.running[0].end <= self.progress + self._near:
            self._end(heapq.heappop(self.running))
        while self.waiting and len(self.running) < self.speed.places:
            self._begin(*self.waiting.popleft())
        if self.running:
            left = (self.running[0].end - self.progress) * self.speed.seconds[len(self.running)]
            self.timer = self.loop.call_at(self.at + max(0.0, left), self._go_on)

    @property
    def _near(self) -> float:
        """Tokens that may be lacking: the clock goes in ticks."""
        return EXACT + self.loop.tick_s / 2 / self.speed.seconds[len(self.running)]

    def _begin(self, request: Request, answer: asyncio.Future[Completion]) -> None:
        known = self.cached.pop(request.trajectory, 0)
        self.count += 1
        sequence = _Sequence(self.progress + request.max_tokens, self.count, request, answer, [(self.version, 0)])
        heapq.heappush(self.running, sequence)
        self.held += sequence.tokens - known
        self._reads(len(request.tokens) - known)
        self._make_room()

    def _end(self, sequence: _Sequence) -> None:
        self.cached[sequence.request.trajectory] = sequence.tokens
        self._make_room()
        count = sequence.request.max_tokens
        if not sequence.answer.done():
            versions = tuple((v, min(at, count - 1)) for v, at in _distinct(sequence.versions))
            sequence.answer.set_result(Completion(sequence.request.id, range(count), [], "stop", versions))

    def _make_room(self) -> None:
        while self.cached and self.held > self.speed.cache_tokens:
            self.held -= self.cached.popitem(last=False)[1]


def _distinct(versions: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """One for each place: where nothing was written in between, the newest counts."""
    return list({at: (version, at) for version, at in versions}.values())


class SimulatedFleet:
    """As much of a `cluster.fleet.Fleet` as a router asks; none of its engines fails.

    Args:
        loop: In virtual time.
        count: Engines.
        speed: Of each.
    """

    def __init__(self, loop: VirtualTime, count: int, speed: Speed) -> None:
        self.engines = [SimulatedEngine(loop, speed) for _ in range(count)]
        self.serving = list(range(count))
        self.facts = [Facts(int(speed.cache_tokens), 0)] * count
        self.group = SimpleNamespace(name="engine", actors=[_actor(engine) for engine in self.engines])

    def ask(self, method: str, timeout: float) -> None:
        """All of them do that."""
        for engine in self.engines:
            getattr(engine, method)()

    def check(self) -> None:
        """All serve."""

    def pause(self) -> None:
        """A sync begins."""
        for engine in self.engines:
            engine.pause()

    def resume(self, version: int) -> None:
        """It has ended."""
        for engine in self.engines:
            engine.resume(version)

    def measured(self) -> tuple[float, float]:
        """`idle` and `filled` of all."""
        found = [engine.measured() for engine in self.engines]
        return sum(idle for idle, _ in found), sum(filled for _, filled in found)


def _actor(engine: SimulatedEngine) -> Any:
    """What Ray gives for one."""

    def stream(requests: Sequence[Request], _: Sampling) -> _Stream:
        return _Stream(engine, requests)

    return SimpleNamespace(generate_many=SimpleNamespace(options=lambda **_: SimpleNamespace(remote=stream)))


class _Stream:
    """The answers to one message as Ray streams them: references, each to all that have come since the last one.

    What it gives to wait for are futures, no coroutines, as each of these would be a task.
    """

    def __init__(self, engine: SimulatedEngine, requests: Sequence[Request]) -> None:
        self.loop, self.left = engine.loop, len(requests)
        self.ended: list[Completion] = []
        self.wanted: asyncio.Future[Any] | None = None
        for request in requests:
            engine.submit(request).add_done_callback(self._take)

    def __aiter__(self) -> _Stream:
        return self

    def __anext__(self) -> asyncio.Future[Any]:
        self.wanted = self.loop.create_future()
        if not self.left:
            self.wanted.set_exception(StopAsyncIteration())
        self._give()
        return self.wanted

    def _take(self, answer: asyncio.Future[Completion]) -> None:
        self.ended.append(answer.result())
        self._give()

    def _give(self) -> None:
        if self.ended and self.wanted is not None and not self.wanted.done():
            reference = self.loop.create_future()
            reference.set_result(self.ended)
            self.wanted.set_result(reference)
            self.left -= len(self.ended)
            self.ended = []
