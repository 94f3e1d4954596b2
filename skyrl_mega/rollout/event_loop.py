"""One event loop for many phases: one after another, or in a thread of its own for as long as a run lasts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Protocol, Self, TypeVar

Answer = TypeVar("Answer")
END_S = 60.0
"""For what is under way to end, once it is cancelled: environments are closed in it."""


class Loop(Protocol):
    """Where a generator's phases run."""

    def run(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        """Its result, once it is there."""

    def __exit__(self, *_: object) -> None:
        """Ends what is under way."""


class ServiceLoop(Loop, Protocol):
    """Where work goes on between the calls of another thread: `BackgroundLoop`, or virtual time."""

    def start(self, work: Coroutine[Any, Any, Any]) -> object:
        """Begins it, and does not wait."""

    def call(self, function: Callable[..., object], *args: object) -> None:
        """Calls it in the loop, soon."""

    def wait(self, ready: Callable[[], bool], seconds: float) -> None:
        """Returns once that is so, or so many seconds have passed."""

    def changed(self) -> None:
        """From the loop: whoever waits looks again."""


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
        await _cancel_others()


class BackgroundLoop:
    """An event loop in a thread of its own, in which phases and whatever else is started go side by side.

    It ends with the `with` block, and what is under way in it then is cancelled.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollouts", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(TimeoutError):  # what does not end for that long ends with the process
            self.start(_cancel_others()).result(END_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        """Its result; the calling thread waits for it. What else is under way goes on."""
        future = self.start(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def start(self, work: Coroutine[Any, Any, Answer]) -> Future[Answer]:
        """Begins it, and does not wait."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, function: Callable[..., object], *args: object) -> None:
        """Calls it in the loop's thread, soon."""
        self._loop.call_soon_threadsafe(function, *args)

    def wait(self, ready: Callable[[], bool], seconds: float) -> None:
        """Returns once that is so, or so many seconds have passed. What makes it so tells with `changed`."""
        with self._changed:
            self._changed.wait_for(ready, seconds)

    def changed(self) -> None:
        """From the loop's thread: whoever waits looks again."""
        with self._changed:
            self._changed.notify_all()


async def _cancel_others() -> None:
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
