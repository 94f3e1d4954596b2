"""Engines in virtual time, as the router sees them: all sequences that one runs get their tokens equally fast, the more
of them the slower, and the rest wait for a place.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from skyrl_mega.engines.base import Completion, Facts, Request, Sampling

GRAIN = 64
"""Real tokens that one token of a simulated trajectory stands for: a step may have a hundred million of them."""


@dataclass(order=True)
class _Sequence:
    end: float
    """The engine's progress at which it is done."""
    number: int
    request: Request = field(compare=False)
    answer: asyncio.Future[Completion] = field(compare=False)
    versions: list[tuple[int, int]] = field(compare=False)


class SimulatedEngine:
    """One engine.

    Args:
        loop: In virtual time.
        seconds: Of one token of each, by how many sequences it runs, from 0 to as many as it can.
        prefill_s: Seconds in which it reads one token; nothing is written meanwhile.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: Sequence[float], prefill_s: float) -> None:
        self.loop, self.seconds, self.prefill_s = loop, seconds, prefill_s
        self.version, self.paused = 0, False
        self.running: list[_Sequence] = []
        self.waiting: deque[tuple[Request, asyncio.Future[Completion]]] = deque()
        self.progress = 0.0
        """Tokens that each of the running ones has got since its beginning; a later one began with more."""
        self.at = 0.0
        """The time of `progress`. Ahead of the clock while it reads."""
        self.busy = self.filled = 0.0
        """Seconds in which it ran any sequence; and the sum of how many, times seconds."""
        self.seen = 0.0
        self.count = 0
        self.timer: asyncio.TimerHandle | None = None

    def submit(self, request: Request) -> asyncio.Future[Completion]:
        """Takes a request, which writes all the tokens that it may."""
        answer: asyncio.Future[Completion] = self.loop.create_future()
        self.waiting.append((request, answer))
        self._go_on()
        return answer

    def pause(self) -> None:
        """A sync begins: nothing is written."""
        self._advance()
        self.paused = True

    def resume(self, version: int) -> None:
        """A sync has ended: what runs is read again with the new weights."""
        self._advance()
        self.paused, self.version = False, version
        now = self.loop.time()
        read = 0.0
        for sequence in self.running:
            written = GRAIN * sequence.request.max_tokens - (sequence.end - self.progress)
            sequence.versions.append((version, int(written / GRAIN)))
            read += written + GRAIN * len(sequence.request.tokens)
        self.at = now + read * self.prefill_s
        self._go_on()

    def measured(self) -> tuple[float, float]:
        """`busy` and `filled` up to now."""
        self._advance()
        return self.busy, self.filled

    def _advance(self) -> None:
        now, running = self.loop.time(), len(self.running)
        if running:
            self.busy += now - self.seen
            self.filled += (now - self.seen) * running
        self.seen = now
        if now > self.at:
            if running and not self.paused:
                self.progress += (now - self.at) / self.seconds[running]
            self.at = now

    def _go_on(self) -> None:
        """Ends what is done, begins what has a place, and sets the clock for the next end."""
        self._advance()
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        if self.paused:
            return
        while self.running and self.running[0].end <= self.progress + 1e-6:
            self._end(heapq.heappop(self.running))
        while self.waiting and len(self.running) < len(self.seconds) - 1:
            request, answer = self.waiting.popleft()
            self.count += 1
            end = self.progress + GRAIN * request.max_tokens
            sequence = _Sequence(end, self.count, request, answer, [(self.version, 0)])
            heapq.heappush(self.running, sequence)
            self.at = max(self.at, self.loop.time()) + request.routes_from * self.prefill_s
        if self.running:
            left = (self.running[0].end - self.progress) * self.seconds[len(self.running)]
            self.timer = self.loop.call_at(max(self.at, self.loop.time()) + left, self._go_on)

    def _end(self, sequence: _Sequence) -> None:
        count = sequence.request.max_tokens
        if not sequence.answer.done():
            versions = tuple((v, min(at, count - 1)) for v, at in _distinct(sequence.versions))
            sequence.answer.set_result(Completion(sequence.request.id, [0] * count, [0.0] * count, "stop", versions))


def _distinct(versions: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """One for each place: where nothing was written in between, the newest counts."""
    return list({at: (version, at) for version, at in versions}.values())


class SimulatedFleet:
    """As much of a `cluster.fleet.Fleet` as a router asks; none of its engines fails.

    Args:
        loop: In virtual time.
        count: Engines.
        seconds, prefill_s: Of each.
        facts: As they would find out about themselves.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, count: int, seconds: Sequence[float], prefill_s: float, facts: Facts
    ) -> None:
        self.engines = [SimulatedEngine(loop, seconds, prefill_s) for _ in range(count)]
        self.serving = list(range(count))
        self.facts = [facts] * count
        self.group = SimpleNamespace(name="engine", actors=[_actor(engine) for engine in self.engines])

    def ask(self, method: str, timeout: float) -> None:
        """Nothing is cached."""

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
        """`busy` and `filled` of all."""
        found = [engine.measured() for engine in self.engines]
        return sum(busy for busy, _ in found), sum(filled for _, filled in found)


def _actor(engine: SimulatedEngine) -> Any:
    """What Ray gives for one."""

    async def stream(requests: list[Request], _: Sampling) -> AsyncIterator[Awaitable[list[Completion]]]:
        ended: asyncio.Queue[Completion] = asyncio.Queue()
        for request in requests:
            engine.submit(request).add_done_callback(lambda answer: ended.put_nowait(answer.result()))
        for _place in requests:
            yield _answer([await ended.get()])

    return SimpleNamespace(generate_many=SimpleNamespace(options=lambda **_: SimpleNamespace(remote=stream)))


async def _answer(completions: list[Completion]) -> list[Completion]:
    return completions
