"""An event loop in which waiting takes no time: hours of engines, tools and training pass in seconds."""

from __future__ import annotations

import asyncio
import contextlib
import selectors
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, Self, TypeVar, TypeVarTuple

Answer = TypeVar("Answer")
Given = TypeVarTuple("Given")
LONGEST_S = 1e8
"""Three years: whoever waits for longer waits for ever."""


class WaitsForEver(RuntimeError):
    """Somebody waits, and nothing is left that could end that."""


class VirtualTime(asyncio.SelectorEventLoop):
    """Its clock jumps to the next timer when nothing else is left to do. It waits for no thread.

    Args:
        longest_s: Seconds after which it is taken for granted that somebody waits for ever.
        tick_s: Seconds to whose multiples the end of each waiting is rounded, up or down, so that much happens at once,
            which is faster. 0: none.
    """

    def __init__(self, longest_s: float = LONGEST_S, tick_s: float = 0.0) -> None:
        self.now, self.longest_s, self.tick_s = 0.0, longest_s, tick_s
        super().__init__(_Jump(self))

    def time(self) -> float:
        """Seconds since its beginning."""
        return self.now

    def call_at(
        self,
        when: float,
        callback: Callable[[*Given], object],
        *args: *Given,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """As the base class, at the nearest tick; what lies beyond the end of time is not called."""
        if when > self.longest_s:
            return asyncio.TimerHandle(when, callback, args, self, context)
        if self.tick_s:
            when = max(self.now, round(when / self.tick_s) * self.tick_s)
        return super().call_at(when, callback, *args, context=context)


class _Jump(selectors.SelectSelector):
    def __init__(self, loop: VirtualTime) -> None:
        super().__init__()
        self.loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout == 0:  # something is to be done anyway, and asking the system takes as long as doing it
            return []
        ready = super().select(0)
        if not ready:
            if timeout is None or self.loop.now > self.loop.longest_s:
                raise WaitsForEver(f"after {self.loop.now:g} simulated seconds somebody waits for ever")
            self.loop.now += timeout
        return ready


class VirtualLoop:
    """A `rollout.event_loop.ServiceLoop` whose other thread is the same one: time passes while that waits."""

    def __init__(self, longest_s: float = LONGEST_S, tick_s: float = 0.0) -> None:
        self.loop = VirtualTime(longest_s, tick_s)
        self._event = asyncio.Event()
        self._over = 0.0
        """Seconds that `sleep` has rounded off, so far."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.now = 0.0  # also where somebody waited for ever
        while left := asyncio.all_tasks(self.loop):
            for task in left:
                task.cancel()
            self.loop.run_until_complete(asyncio.wait(left))
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()

    @property
    def now(self) -> float:
        """Seconds since its beginning."""
        return self.loop.now

    def run(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        """Its result; what else is under way goes on meanwhile."""
        return self.loop.run_until_complete(work)

    def start(self, work: Coroutine[Any, Any, Any]) -> object:
        """Begins it, and does not wait."""
        return self.loop.create_task(work)

    def call(self, function: Callable[..., object], *args: object) -> None:
        """Calls it in the loop, soon."""
        self.loop.call_soon(function, *args)

    def wait(self, ready: Callable[[], bool], seconds: float) -> None:
        """Returns once that is so, or so many seconds have passed.

        A tick at least passes: else who looks more often than the clock ticks would look for ever at the same time.
        """
        self.run(self._wait(ready, max(seconds, self.loop.tick_s)))

    def changed(self) -> None:
        """From the loop: whoever waits looks again."""
        self._event.set()

    def sleep(self, seconds: float) -> None:
        """Lets time pass, in whole ticks: what is over, or lacking, is of the next time."""
        if tick := self.loop.tick_s:
            self._over += seconds
            seconds = round(self._over / tick) * tick
            self._over -= seconds
        self.run(asyncio.sleep(seconds))

    async def _wait(self, ready: Callable[[], bool], seconds: float) -> None:
        self._event.clear()
        if not ready():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._event.wait(), seconds)
