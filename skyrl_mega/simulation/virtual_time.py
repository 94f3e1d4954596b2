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
"""Three years: a longer wait counts as endless."""


class EndlessWait(RuntimeError):
    """A coroutine waits for an event that can no longer happen."""


class VirtualTime(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer when idle. Threads are not waited for.

    The loop raises `EndlessWait` if all tasks wait and no timer is left.

    Args:
        longest_s: Virtual seconds after which a wait counts as endless.
        tick_s: Timers are rounded to multiples of this, up or down, so that many events coincide, for speed. 0: no
            rounding.
    """

    def __init__(self, longest_s: float = LONGEST_S, tick_s: float = 0.0) -> None:
        self.now, self.longest_s, self.tick_s = 0.0, longest_s, tick_s
        super().__init__(_Jump(self))

    def time(self) -> float:
        """Returns the virtual seconds since the start."""
        return self.now

    def call_at(
        self,
        when: float,
        callback: Callable[[*Given], object],
        *args: *Given,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Schedules a callback at the tick nearest to `when`, in virtual seconds since the start, and returns its
        handle, by which the call can be cancelled. A callback later than `longest_s` never runs."""
        if when > self.longest_s:
            return asyncio.TimerHandle(when, callback, args, self, context)
        if self.tick_s:
            when = max(self.now, round(when / self.tick_s) * self.tick_s)
        return super().call_at(when, callback, *args, context=context)


class _Jump(selectors.PollSelector):  # `select` takes no file descriptor above 1023
    def __init__(self, loop: VirtualTime) -> None:
        super().__init__()
        self.loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout == 0:  # callbacks are ready, and polling the system takes as long as running them
            return []
        ready = super().select(0)
        if not ready:
            if timeout is None or self.loop.now > self.loop.longest_s:
                raise EndlessWait(
                    f"after {self.loop.now:g} simulated seconds a task waits for an event that never comes"
                )
            self.loop.now += timeout
        return ready


class VirtualLoop:
    """A `rollout.event_loop.ServiceLoop` on a single thread: virtual time passes while the caller waits.

    Tasks run only during `run`, `wait` and `sleep`. These raise `EndlessWait` if a task waits forever.

    Args:
        longest_s, tick_s: As for `VirtualTime`.
    """

    def __init__(self, longest_s: float = LONGEST_S, tick_s: float = 0.0) -> None:
        self.loop = VirtualTime(longest_s, tick_s)
        self._event = asyncio.Event()
        self._remainder = 0.0
        """Seconds rounded off by `sleep` so far."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.now = 0.0  # also after an endless wait
        while left := asyncio.all_tasks(self.loop):
            for task in left:
                task.cancel()
            self.loop.run_until_complete(asyncio.wait(left))
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()

    @property
    def now(self) -> float:
        """Virtual seconds since the start."""
        return self.loop.now

    def run(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        """Runs a coroutine and returns the result; other tasks continue meanwhile."""
        return self.loop.run_until_complete(work)

    def start(self, work: Coroutine[Any, Any, Any]) -> object:
        """Makes a coroutine a task of the loop and returns the task, without waiting."""
        return self.loop.create_task(work)

    def call(self, function: Callable[..., object], *args: object) -> None:
        """Schedules a call of a function: it happens when the loop runs next."""
        self.loop.call_soon(function, *args)

    def wait(self, ready: Callable[[], bool], seconds: float) -> None:
        """Returns at once if `ready` holds; else waits for the next `changed`, at most for `seconds` of virtual time.
        The caller checks the condition again, because it may still not hold.

        The limit is at least a tick: otherwise a caller polling faster than the clock ticks would see the same time
        forever.
        """
        self.run(self._wait(ready, max(seconds, self.loop.tick_s)))

    def changed(self) -> None:
        """Ends the present `wait`, so that its caller checks the condition again. Tasks of the loop call this."""
        self._event.set()

    def sleep(self, seconds: float) -> None:
        """Runs tasks for this many virtual seconds, in whole ticks; the remainder is added to the next call."""
        if tick := self.loop.tick_s:
            self._remainder += seconds
            seconds = round(self._remainder / tick) * tick
            self._remainder -= seconds
        self.run(asyncio.sleep(seconds))

    async def _wait(self, ready: Callable[[], bool], seconds: float) -> None:
        self._event.clear()
        if not ready():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._event.wait(), seconds)
