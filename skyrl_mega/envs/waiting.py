"""A clock for the time an environment waits for a shared resource: time limits of steps must not count waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_thread = threading.local()


class Clock:
    """A clock of the time that a thread has waited for shared resources, in blocks of `waiting`."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._since: float | None = None

    def waited(self) -> float:
        """Returns the seconds waited so far, including the present wait; callable from any thread."""
        since = self._since
        return self._sum + (0.0 if since is None else time.perf_counter() - since)

    @property
    def is_waiting(self) -> bool:
        """True between `begin` and `end`."""
        return self._since is not None

    def begin(self) -> None:
        """Marks the start of a wait, which `end` ends."""
        self._since = time.perf_counter()

    def end(self) -> None:
        """Adds the time since `begin` to the sum; does nothing without `begin`."""
        if self._since is not None:
            waited, self._since = time.perf_counter() - self._since, None
            self._sum += waited

    def run_here(self) -> None:
        """Makes this clock count the waits of the current thread; replaces the thread's earlier clock."""
        _thread.clock = self


def working_clock() -> float:
    """Returns `time.monotonic()` minus the seconds waited by the current thread, as counted by its clock."""
    clock: Clock | None = getattr(_thread, "clock", None)
    return time.monotonic() - (0.0 if clock is None else clock.waited())


@contextmanager
def waiting() -> Iterator[None]:
    """Counts the time inside the `with` block as waiting, on the clock of the current thread; without a clock, or
    inside another such block, does nothing."""
    clock: Clock | None = getattr(_thread, "clock", None)
    if clock is None or clock.is_waiting:
        yield
        return
    clock.begin()
    try:
        yield
    finally:
        clock.end()
