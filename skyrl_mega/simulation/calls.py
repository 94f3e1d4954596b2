"""Calls of environments, and environments that are open, in virtual time: so many at once, and how many calls run on
average.

Where each simulated trajectory stands for several, so does a place for a call and a slot. Few places are no whole
number of such: there is then one more, and each stays taken for longer than it is used, so that as many calls end in a
second. The trajectory itself goes on at once, so that none takes longer where nobody waits for a place.
"""

from __future__ import annotations

import asyncio
import math
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from skyrl_mega.config.schema import EnvironmentConfig
from skyrl_mega.rollout.slots import PendingTrajectory, Player, SlotAgent, Slots
from skyrl_mega.rollout.trajectory import Trajectory
from skyrl_mega.simulation.virtual_time import VirtualTime

EXACT = 1e-9
"""Of a place that a quotient is too large by, as floating point numbers are."""
OWN = "own"
"""Among a trajectory's seconds: those in which it did not wait for a place for a call."""


@dataclass(frozen=True)
class Places:
    """So many at once."""

    count: int
    held: float = 1.0
    """How many times as long one is taken as it is used, 1 at least."""

    @classmethod
    def of(cls, whole: int, factor: float) -> Places:
        """Where each user stands for so many: 5 of 4 users are 2 places, taken for 1.6 times as long."""
        count = math.ceil(whole / factor - EXACT)
        return cls(count, max(1.0, count * factor / whole))


@dataclass(frozen=True)
class Bounds:
    """Of environments."""

    calls: Places
    """At once."""
    slots: Places | None
    """Open at once."""
    at_once: float
    """Calls that there can be, whole or not: an open trajectory has one at a time."""

    @classmethod
    def of(cls, environment: EnvironmentConfig, factor: float) -> Bounds:
        """Where each trajectory stands for so many.

        What may differ: trajectories of one length take their slots in rounds, and where slots are just fewer than a
        half, a third or a quarter of them, all that there are need a round more than those that are simulated.
        """
        workers, slots = environment.workers, environment.slots
        calls, opened = Places.of(workers, factor), slots and Places.of(slots, factor)
        if not slots or not opened:
            return cls(calls, None, workers / factor)
        if slots <= workers:  # no call waits
            calls = Places(max(calls.count, opened.count))
        return cls(calls, opened, min(workers, slots) / factor)


class Calls:
    """Has calls wait for one another.

    Args:
        places: For them.
        loop: Says what time it is.
    """

    def __init__(self, places: Places, loop: VirtualTime) -> None:
        self.places, self.loop = places, loop
        self._free = asyncio.Semaphore(places.count)
        self._now, self._seen, self._seconds = 0, 0.0, 0.0
        self._over = 0.0
        """Seconds for which places were free too early, as what ends does so at a tick."""

    async def take(self, seconds: float) -> float:
        """One that takes so long, once there is a place; seconds that it waited for that."""
        start = self.loop.time()
        await self._free.acquire()
        waited = self.loop.time() - start
        self._change(1)
        try:
            await asyncio.sleep(seconds)
        finally:
            self._change(-1)
            self._give_back((self.places.held - 1) * seconds)
        return waited

    def measured(self) -> float:
        """Seconds of all calls up to now."""
        self._change(0)
        return self._seconds

    def _give_back(self, after: float) -> None:
        """A place, after so many seconds."""
        after += self._over
        tick = self.loop.tick_s
        whole = round(after / tick) * tick if tick else after
        self._over = after - whole
        if whole > 0:
            self.loop.call_later(whole, self._free.release)
        else:
            self._free.release()

    def _change(self, by: int) -> None:
        now = self.loop.time()
        self._seconds += (now - self._seen) * self._now
        self._now, self._seen = self._now + by, now


class HeldSlots(SlotAgent):
    """A slot is taken for longer than a trajectory takes that has it.

    Args:
        player: Who plays; a trajectory's seconds tell of `OWN`.
        slots: So many.
    """

    def __init__(self, player: Player, slots: Places) -> None:
        super().__init__(player, Slots(slots.count))
        self.held = slots.held
        self._later: set[asyncio.Task[Any]] = set()

    async def play(self, opened: PendingTrajectory, name: str) -> Trajectory:
        """As the base class. Time in which a trajectory waits for a call is not made longer: its slot's others wait."""
        now = asyncio.get_running_loop().time
        slot = AsyncExitStack()
        await slot.enter_async_context(self.slots.hold(self))
        begun = now()
        t = await self.player.play(opened.prompt, opened.sample, name)
        task = asyncio.create_task(_close(slot, begun + self.held * t.seconds[OWN] - now()))
        self._later.add(task)
        task.add_done_callback(self._later.discard)
        return t


async def _close(slot: AsyncExitStack, after: float) -> None:
    if after > 0:
        await asyncio.sleep(after)
    await slot.aclose()
