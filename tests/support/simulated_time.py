"""Simulated time for tests: hours of time-outs, queues and slow engines pass in a second."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import partial
from typing import Any, TypeVar

from skyrl_mega.simulation.virtual_time import VirtualTime

T = TypeVar("T")
LONGEST_S = 5e4
"""Upper bound of the simulated time in tests."""


def run(main: Coroutine[Any, Any, T]) -> tuple[T, float]:
    """Runs a coroutine like `asyncio.run`; returns the result and the simulated seconds."""
    with asyncio.Runner(loop_factory=partial(VirtualTime, LONGEST_S)) as runner:
        return runner.run(main), runner.get_loop().time()
