"""One event loop for many phases, one after another."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Self, TypeVar

Answer = TypeVar("Answer")


class EventLoop:
    """Runs coroutines as `asyncio.run` does, all of them in one loop, which ends with the `with` block.

    So what lives longer than a phase, such as a pool of environments, may be used in every one of them.
    """

    def __init__(self) -> None:
        self._runner = asyncio.Runner()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.close()

    def run(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        """Its result. Whatever it has started and left under way is cancelled, and has ended when this returns."""
        return self._runner.run(_alone(work))


async def _alone(work: Coroutine[Any, Any, Answer]) -> Answer:
    try:
        return await work
    finally:
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
