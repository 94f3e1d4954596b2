"""Simulated time for tests: hours of time-outs, queues and slow engines pass in a second."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import partial
from typing import Any, TypeVar

from skyrl_mega.simulation.virtual_time import VirtualTime

T = TypeVar("T")
LONGEST_S = 5e4
"""Nothing in a test takes longer."""


def run(main: Coroutine[Any, Any, T]) -> tuple[T, float]:
    """As `asyncio.run`: what it returns, and how many simulated seconds it took."""
    with asyncio.Runner(loop_factory=partial(VirtualTime, LONGEST_S)) as runner:
        return runner.run(main), runner.get_loop().time()
