"""Requests in waves, so that what an engine computes together does not depend on the clock (`run.deterministic`).

The last bits of a log-prob depend on which sequences run beside it. Requests that come when they come, as environments
answer, and go where room is, are computed in another company each time. Here a wave leaves when every trajectory waits
for its next turn: in the order of their names, each to the engine of its first turn.
"""

from __future__ import annotations

import asyncio
from typing import Any

from skyrl_mega.rollout.router import Router, Waiting


class Waves(Router):
    """A router that repeats itself, as long as no engine fails.

    A wave is as slow as its longest turn, and an engine is given all of its part at once.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.players = 0
        """Trajectories that are being played, each with one request at most."""
        self.places: dict[str, int] = {}
        """Trajectory → its number, in the order of the first wave; says whose engine has its cached prefix."""

    def expect(self, players: int) -> None:
        """So many trajectories are about to ask."""
        self.players += players

    def leave(self) -> None:
        """One of them has ended."""
        self.players -= 1
        self._schedule()

    def _dispatch(self) -> None:
        """Hands out a wave, once nobody is missing and the engines are through with the one before."""
        self.scheduled = False
        wanted = [waiting for waiting in self.queue if not waiting.answer.done()]  # none of a phase that is abandoned
        if self.tasks or not wanted or len(wanted) < self.players:
            return
        wave = sorted(wanted, key=lambda waiting: waiting.request.id)
        self.queue.clear()
        engines = sorted(self.load)
        parts: dict[int, dict[str, Waiting]] = {engine: {} for engine in engines}
        for waiting in wave:
            place = self.places.setdefault(waiting.request.trajectory, len(self.places))
            engine = engines[place % len(engines)]
            parts[engine][waiting.request.id] = waiting
            self.load[engine].add(waiting)
        self._send(parts)

    def _ended(self, part: dict[str, Waiting], task: asyncio.Task[None]) -> None:
        super()._ended(part, task)
        self._schedule()
