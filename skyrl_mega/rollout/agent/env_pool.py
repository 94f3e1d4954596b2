"""Threads for environment code, which may block or never return, next to an event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from skyrl_mega.envs.event_loop import Pending
from skyrl_mega.envs.waiting import Clock

log = logging.getLogger(__name__)

INLINE_S = 1.0
"""Longest inline call, in seconds. After a longer one, calls run in threads: the event loop stands still meanwhile."""


class Call:
    """A function to run in a thread.

    Args:
        function: The function.
        args: Arguments of the function.
        late: Runs in the same thread if the function returns after `give_up`.
    """

    def __init__(self, function: Callable[..., Any], *args: Any, late: Callable[[], Any] | None = None) -> None:
        self.function, self.args, self.late = function, args, late
        self.start: float | None = None
        self.end: float | None = None
        self.given_up = False
        """True if the caller stopped waiting before the function returned."""
        self._clock, self._pending = Clock(), Pending()
        self._lock = threading.Lock()

    def run(self) -> tuple[Any, BaseException | None]:
        """Runs the function in this thread and returns (value, None), or (None, exception). Never raises: `sys.exit`
        must end the call only, not the program. After `give_up`, also runs `late`; its error is only logged."""
        value, error = None, None
        self.start = time.perf_counter()
        self._clock.run_here()
        self._pending.run_here()
        try:
            value = self.function(*self.args)
        except BaseException as raised:
            error = raised
        with self._lock:
            self.end = time.perf_counter()
        if self.given_up and self.late is not None:
            try:
                self.late()
            except Exception as raised:
                log.warning(
                    "an environment returned after its time limit, and then could not be closed: %s",
                    type(raised).__name__,
                )
        return value, error

    def give_up(self) -> bool:
        """Marks the call as abandoned, cancels the function's coroutine, if any, and returns True. Returns False and
        does nothing if the function has already returned. The thread itself is not stopped."""
        with self._lock:
            self.given_up = self.end is None
        if self.given_up:
            self._pending.cancel()
        return self.given_up

    def seconds(self) -> float:
        """Returns the running time of the function in seconds, until now or until the return; 0 before the start."""
        if self.start is None:
            return 0.0
        return (self.end or time.perf_counter()) - self.start

    def working(self) -> float:
        """Returns `seconds()` minus the function's waits for shared resources."""
        return self.seconds() - self._clock.waited()


class EnvPool:
    """A pool that runs each call in a new thread, with a limit on calls at once.

    An abandoned call frees its slot but leaves its thread running; neither later calls nor the program's exit wait for
    the thread.

    Args:
        most: Most calls at once.
        count: Receives changes of the number of running calls (`telemetry.timeline`).
    """

    def __init__(self, most: int, count: Callable[[int], None] = lambda change: None) -> None:
        self._slots, self._count = asyncio.Semaphore(most), count
        self.agents = asyncio.Semaphore(most)
        """Bounds agents at work (`envs.agent`), held around `run_agent`. Other calls never wait for an agent."""
        self._may_inline = True

    async def run(self, call: Call, limit_s: float, *, inline: bool = False) -> Any:
        """Runs a call in a thread and returns the value. If the caller is cancelled, the call is given up, as after the
        limit: its thread runs on.

        Args:
            call: The call; runs once.
            inline: Runs the call in this thread, without a limit on time or calls, until a call takes over `INLINE_S`.
            limit_s: Time limit in seconds. Not counted are the wait for a slot, waits for shared resources, and times
                at which the machine is overloaded.

        Raises:
            Abandoned: The call exceeded the limit.
            Raised: The call raised an exception, kept as `error`.
        """
        if not (inline and self._may_inline):
            return _value(*await self._in_thread(call, limit_s))
        outcome = call.run()
        if call.seconds() > INLINE_S:
            self._may_inline = False
            log.warning(
                "a call of an environment with `blocking = False` took %.1f s; the pool uses threads from here on",
                call.seconds(),
            )
        return _value(*outcome)

    async def run_agent(self, call: Call, limit_s: float) -> Any:
        """Runs a call that takes as long as a whole trajectory, in a thread of its own, and returns the value. The call
        takes no slot and waits for none; callers bound the number by `agents`.

        Args:
            call: The call; runs once.
            limit_s: Time limit in seconds; see `run`.

        Raises:
            Abandoned: The call exceeded the limit.
            Raised: The call raised an exception, kept as `error`.
        """
        return _value(*await self._in_new_thread(call, limit_s))

    async def _in_thread(self, call: Call, limit_s: float) -> tuple[Any, BaseException | None]:
        """Waits for a slot, runs a call in a thread and returns the value, or the exception."""
        async with self._slots:
            return await self._in_new_thread(call, limit_s)

    async def _in_new_thread(self, call: Call, limit_s: float) -> tuple[Any, BaseException | None]:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

        def work() -> None:
            outcome = call.run()
            try:
                loop.call_soon_threadsafe(_set_result, answer, outcome)
            except RuntimeError:  # the loop ended meanwhile: no task waits
                return

        threading.Thread(target=work, name="environment", daemon=True).start()
        self._count(1)
        try:
            while not (await asyncio.wait([answer], timeout=limit_s))[0]:
                if call.working() > limit_s and call.give_up():
                    raise Abandoned
        except asyncio.CancelledError:
            call.give_up()
            raise
        finally:
            self._count(-1)
        return answer.result()


class Abandoned(Exception):
    """A call of an environment exceeded the time limit; the thread may still run."""


class Raised(Exception):
    """A call raised an exception. The wrapper keeps exceptions such as `CancelledError` or `SystemExit` from affecting
    the event loop."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
        super().__init__(type(error).__name__)


def _value(value: Any, error: BaseException | None) -> Any:
    """Returns the value of a call, or raises its exception as `Raised`."""
    if error is not None:
        raise Raised(error) from error
    return value


def _set_result(answer: asyncio.Future[Any], outcome: tuple[Any, BaseException | None]) -> None:
    if not answer.done():
        answer.set_result(outcome)
