"""Time that an environment waits its turn for something shared is not time that it works: a limit must not count it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_here = threading.local()


class Clock:
    """How long a thread has waited its turn."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._since: float | None = None

    def waited(self) -> float:
        """Seconds so far; any thread may ask."""
        since = self._since
        return self._sum + (0.0 if since is None else time.perf_counter() - since)

    def begin(self) -> None:
        """The thread waits from now on."""
        self._since = time.perf_counter()

    def end(self) -> None:
        """It has what it waited for."""
        if self._since is not None:
            waited, self._since = time.perf_counter() - self._since, None
            self._sum += waited

    def run_here(self) -> None:
        """Counts what this thread waits."""
        _here.clock = self


@contextmanager
def waiting() -> Iterator[None]:
    """Around a wait for something that others hold."""
    clock: Clock | None = getattr(_here, "clock", None)
    if clock is None:
        yield
        return
    clock.begin()
    try:
        yield
    finally:
        clock.end()
