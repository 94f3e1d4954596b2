"""Environment calls and open environments in virtual time, with bounds on concurrency and a measure of the average
load.

If each simulated trajectory represents several, so does each place for a call or a slot. The bound is then rounded up,
and each place stays occupied for longer than used, so that the call throughput stays exact. The trajectory itself
continues at once: without contention no call takes longer.
"""

from __future__ import annotations

import asyncio
import math
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from skyrl_mega.config.schema import EnvironmentConfig
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.rollout.gate import Start
from skyrl_mega.rollout.player import Player
from skyrl_mega.rollout.slots import Slots
from skyrl_mega.simulation.virtual_time import VirtualTime
from skyrl_mega.trajectories.trajectory import Trajectory

EXACT = 1e-9
"""Tolerance for floating-point error in a quotient of places."""
OWN_SECONDS = "own"
"""Key in `Trajectory.seconds`: the time of a trajectory without waiting for a call's place."""


@dataclass(frozen=True)
class Places:
    """A bound on concurrent use: a number of places."""

    count: int
    occupation: float = 1.0
    """Factor, at least 1, of the time a place stays occupied over the time of use."""

    @classmethod
    def of(cls, limit: int, factor: float) -> Places:
        """Returns a bound of `limit` places, scaled for simulated users that each represent `factor` real users: 5
        places with factor 4 become 2, occupied 1.6 times as long."""
        count = math.ceil(limit / factor - EXACT)
        return cls(count, max(1.0, count * factor / limit))


@dataclass(frozen=True)
class Bounds:
    """Bounds on concurrent calls and open environments of a simulated run."""

    calls: Places
    """Concurrent calls."""
    slots: Places | None
    """Concurrently open environments; None without a bound."""
    at_once: float
    """Possible concurrent calls, perhaps fractional: an open trajectory runs at most a single call at a time."""

    @classmethod
    def of(cls, environment: EnvironmentConfig, factor: float) -> Bounds:
        """Returns the bounds in the settings, scaled for trajectories that each represent `factor` real trajectories.
        `environment` are the settings of environments.

        A known inaccuracy: trajectories of equal length take slots in rounds. With slots slightly below a half, a third
        or a quarter of the trajectories, the real run needs another round, the simulated run does not.
        """
        workers, slots = environment.workers, environment.slots
        calls, opened = Places.of(workers, factor), slots and Places.of(slots, factor)
        if not slots or not opened:
            return cls(calls, None, workers / factor)
        if slots <= workers:  # calls never wait then
            calls = Places(max(calls.count, opened.count))
        return cls(calls, opened, min(workers, slots) / factor)


class Calls:
    """Environment calls in virtual time, under a bound on concurrency.

    Args:
        places: The bound.
        loop: The virtual clock.
    """

    def __init__(self, places: Places, loop: VirtualTime) -> None:
        self.places, self.loop = places, loop
        self._free = asyncio.Semaphore(places.count)
        self._now, self._seen, self._seconds = 0, 0.0, 0.0
        self._rounding = 0.0
        """Seconds of occupation lost so far by rounding to ticks."""

    async def run(self, seconds: float) -> float:
        """Waits for a place, sleeps for `seconds`, the duration of a call, and returns the seconds of waiting for the
        place."""
        start = self.loop.time()
        await self._free.acquire()
        waited = self.loop.time() - start
        self._change(1)
        try:
            await asyncio.sleep(seconds)
        finally:
            self._change(-1)
            self._free_later((self.places.occupation - 1) * seconds)
        return waited

    def measured(self) -> float:
        """Returns the durations of all calls up to now added up, in virtual seconds, without waiting for places."""
        self._change(0)
        return self._seconds

    def _free_later(self, after: float) -> None:
        """Frees a place after this many seconds."""
        after += self._rounding
        tick = self.loop.tick_s
        rounded = round(after / tick) * tick if tick else after
        self._rounding = after - rounded
        if rounded > 0:
            self.loop.call_later(rounded, self._free.release)
        else:
            self._free.release()

    def _change(self, by: int) -> None:
        now = self.loop.time()
        self._seconds += (now - self._seen) * self._now
        self._now, self._seen = self._now + by, now


class HeldSlots:
    """A player with environment slots that stay occupied for longer than their trajectory takes.

    Args:
        player: Runs the trajectories; must report `OWN_SECONDS` in their seconds.
        slots: The bound on slots.
    """

    def __init__(self, player: Player, slots: Places) -> None:
        self.player, self.router = player, player.router
        self.slots, self.occupation = Slots(slots.count), slots.occupation
        self._later: set[asyncio.Task[Any]] = set()

    async def play(self, prompt: Prompt, sample: int, name: str, start: Start | None = None) -> Trajectory:
        """Waits for a slot, runs a sample of a prompt and returns its trajectory; the slot stays occupied afterwards
        (`Places.occupation`). `name` is the sample's name for the player; `start` has no effect. Raises KeyError if the
        trajectory lacks `OWN_SECONDS`.

        Waiting for calls does not lengthen the occupation: other slots wait, too.
        """
        now = asyncio.get_running_loop().time
        slot = AsyncExitStack()
        await slot.enter_async_context(self.slots.hold(self))
        begun = now()
        t = await self.player.play(prompt, sample, name)
        task = asyncio.create_task(_close(slot, begun + self.occupation * t.seconds[OWN_SECONDS] - now()))
        self._later.add(task)
        task.add_done_callback(self._later.discard)
        return t


async def _close(slot: AsyncExitStack, after: float) -> None:
    if after > 0:
        await asyncio.sleep(after)
    await slot.aclose()
