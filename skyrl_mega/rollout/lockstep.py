"""Lockstep routing, which makes the batches of the engines independent of timing (`run.deterministic`).

The last bits of a log-prob depend on the sequences computed in the same batch. If requests are sent as environments
answer, and go to the first engine with capacity, the batches differ from run to run. Here all trajectories wait for
each other before each turn. The requests then leave in name order, each to the engine of the trajectory's first turn.
"""

from __future__ import annotations

import asyncio
from typing import Any

from skyrl_mega.rollout.router import QueuedRequest, Router


class LockstepRouter(Router):
    """A router with reproducible batches, as long as no engine fails.

    A wave is as slow as the longest turn, and an engine receives its whole batch at once.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.running = 0
        """Running trajectories, each with at most one request."""
        self.places: dict[str, int] = {}
        """Trajectory → its number in the order of the first wave, which selects the engine with its cached prefix."""

    def expect(self, trajectories: int) -> None:
        """Announces the number of trajectories about to send requests. The router sends a wave of requests only once
        each of these trajectories has sent a request or has ended."""
        self.running += trajectories

    def leave(self) -> None:
        """Reports the end of an announced trajectory."""
        self.running -= 1
        self._schedule()

    def _dispatch(self) -> None:
        """Sends a wave once every trajectory has a request and the engines have finished the wave before."""
        self.scheduled = False
        # without requests of an abandoned phase
        wanted = [waiting for waiting in self.queue if not waiting.answer.done()]
        if self.tasks or not wanted or len(wanted) < self.running:
            return
        wave = sorted(wanted, key=lambda waiting: waiting.request.id)
        self.queue.clear()
        engines = sorted(self.load)
        batches: dict[int, dict[str, QueuedRequest]] = {engine: {} for engine in engines}
        for waiting in wave:
            place = self.places.setdefault(waiting.request.trajectory, len(self.places))
            engine = engines[place % len(engines)]
            batches[engine][waiting.request.id] = waiting
            self.load[engine].add(waiting)
        self._send(batches)

    def _ended(self, batch: dict[str, QueuedRequest], task: asyncio.Task[None]) -> None:
        super()._ended(batch, task)
        self._schedule()
