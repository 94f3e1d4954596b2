"""Calls of environments in virtual time: so many at once, and how many there were on average."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

from skyrl_mega.config.schema import EnvironmentConfig


class Clock(Protocol):
    """Of the event loop."""

    def time(self) -> float:
        """Seconds since its beginning."""


@dataclass(frozen=True)
class Bounds:
    """Of environments."""

    calls: int
    """At once."""
    slots: int | None
    """Open at once."""
    longer: float = 1.0
    """How many times as long a call takes, so that as many are done in a second where whole calls are too few or too
    many: three that stand for 15 calls of 16 take 15/16 of their time."""

    @classmethod
    def of(cls, environment: EnvironmentConfig, factor: float) -> Bounds:
        """Where each trajectory stands for so many."""
        workers, slots = environment.workers, environment.slots
        calls = max(1, round(workers / factor))
        longer = calls * factor / workers if slots is None or workers < slots else 1.0
        return cls(calls, slots and max(1, round(slots / factor)), longer)

    @property
    def at_once(self) -> int:
        """Calls that there can be: an open trajectory has one at a time."""
        return self.calls if self.slots is None else min(self.calls, self.slots)


class Calls:
    """Has calls wait for one another.

    Args:
        bounds: How many there may be.
        clock: Says what time it is.
    """

    def __init__(self, bounds: Bounds, clock: Clock) -> None:
        self.bounds, self.clock = bounds, clock
        self._places = asyncio.Semaphore(bounds.calls)
        self._now, self._seen, self._seconds = 0, 0.0, 0.0

    async def take(self, seconds: float) -> None:
        """One that takes so long, once there is a place."""
        async with self._places:
            self._change(1)
            try:
                await asyncio.sleep(seconds)
            finally:
                self._change(-1)

    def measured(self) -> float:
        """Seconds of all calls up to now."""
        self._change(0)
        return self._seconds

    def _change(self, by: int) -> None:
        now = self.clock.time()
        self._seconds += (now - self._seen) * self._now
        self._now, self._seen = self._now + by, now
