"""Threads for environments: code that may block, and may never come back, beside an event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from skyrl_mega.envs.waiting import Clock

log = logging.getLogger(__name__)


class Call:
    """A function to be run in a thread.

    Args:
        function: What is run.
        args: Its arguments.
        late: Run in the same thread where the function comes back after it was given up.
    """

    def __init__(self, function: Callable[..., Any], *args: Any, late: Callable[[], Any] | None = None) -> None:
        self.function, self.args, self.late = function, args, late
        self.start: float | None = None
        self.end: float | None = None
        self.given_up = False
        """Nobody waits for it any more, and it had not ended then."""
        self._clock = Clock()
        self._lock = threading.Lock()

    def run(self) -> tuple[Any, BaseException | None]:
        """The function's value, or what it raised, whatever it is: `sys.exit` must end one call, not the program."""
        value, error = None, None
        self.start = time.perf_counter()
        self._clock.run_here()
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
                log.warning("an environment that came back late: %s", type(raised).__name__)
        return value, error

    def give_up(self) -> bool:
        """Nobody waits for the function any more; False where it has ended already."""
        with self._lock:
            self.given_up = self.end is None
        return self.given_up

    def seconds(self) -> float:
        """For how long it has been running; 0 before it has begun."""
        if self.start is None:
            return 0.0
        return (self.end or time.perf_counter()) - self.start

    def working(self) -> float:
        """`seconds` without those in which it waited its turn for something shared."""
        return self.seconds() - self._clock.waited()


class EnvPool:
    """Runs calls, each in a thread of its own, so many at once.

    A call that is given up leaves its place to another and its thread behind: neither the next calls nor the end of
    the program wait for it.

    Args:
        most: Calls at once.
        count: Told of calls: so many more, or fewer, are under way (`telemetry.timeline`).
    """

    def __init__(self, most: int, count: Callable[[int], None] = lambda change: None) -> None:
        self._places, self._count = asyncio.Semaphore(most), count

    async def run(self, call: Call, limit_s: float) -> Any:
        """The function's value.

        Args:
            call: Run once.
            limit_s: Seconds that it may take; those before a place is free, in which it waits its
                turn for something shared, or the machine has no time, are not counted.

        Raises:
            Abandoned: It took longer.
            Raised: It raised.
        """
        async with self._places:
            loop = asyncio.get_running_loop()
            answer: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

            def work() -> None:
                outcome = call.run()
                try:
                    loop.call_soon_threadsafe(_tell, answer, outcome)
                except RuntimeError:  # the loop has ended meanwhile: nobody waits
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
        value, error = answer.result()
        if error is not None:
            raise Raised(error) from error
        return value


class Abandoned(Exception):
    """A call took longer than its limit."""


class Raised(Exception):
    """A call raised: anything, also what would mean something else to the loop that hears of it."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
        super().__init__(type(error).__name__)


def _tell(answer: asyncio.Future[Any], outcome: tuple[Any, BaseException | None]) -> None:
    if not answer.done():
        answer.set_result(outcome)
