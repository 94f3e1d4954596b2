"""A gate through which the trajectories of a batch begin together and in order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

Start = Callable[[], Awaitable[None]]
"""Awaited by a trajectory with an open environment, before the first turn."""


class Gate:
    """A gate that holds trajectories until the environments of all are open. The trajectories then begin in a fixed
    order: requests sent in a fixed order are served in a fixed order, and results repeat.

    Args:
        trajectories: Number of trajectories.
        longest_s: Most seconds until the gate opens, however many environments are open; None sets no limit.
    """

    def __init__(self, trajectories: int, longest_s: float | None = None) -> None:
        self.starts: list[Start] = [partial(self._wait, place) for place in range(trajectories)]
        """The `start` of each trajectory, in the order of beginning."""
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._is_open = False
        loop = asyncio.get_running_loop()
        self._timer = None if longest_s is None else loop.call_later(longest_s, self._open)

    async def _wait(self, place: int) -> None:
        if self._is_open:
            return
        self._waiting[place] = asyncio.get_running_loop().create_future()
        if len(self._waiting) == len(self.starts):
            asyncio.get_running_loop().call_soon(
                self._open
            )  # at once, the last to arrive would begin before all others
        await self._waiting[place]

    def _open(self) -> None:
        self._is_open = True
        if self._timer is not None:
            self._timer.cancel()
        for _, waiting in sorted(self._waiting.items()):
            if not waiting.done():
                waiting.set_result(None)
