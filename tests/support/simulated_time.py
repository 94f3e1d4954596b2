"""An event loop in which waiting takes no time: hours of time-outs, queues and slow engines pass in a second."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
LONGEST_S = 5e4
"""Nothing takes longer: whoever waits so long waits for ever."""


class SimulatedTime(asyncio.SelectorEventLoop):
    """Its clock jumps to the next timer when nothing else is left to do. It waits for no thread."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_Jump(self))

    def time(self) -> float:
        """Seconds since its beginning."""
        return self.now


class _Jump(selectors.SelectSelector):
    def __init__(self, loop: SimulatedTime) -> None:
        super().__init__()
        self.loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            if timeout is None or self.loop.now > LONGEST_S:
                raise RuntimeError(f"after {self.loop.now:g} simulated seconds somebody waits for ever")
            self.loop.now += timeout
        return ready


def run(main: Coroutine[Any, Any, T]) -> tuple[T, float]:
    """As `asyncio.run`: what it returns, and how many simulated seconds it took."""
    with asyncio.Runner(loop_factory=SimulatedTime) as runner:
        return runner.run(main), runner.get_loop().time()
