"""Event loops for several phases: phase after phase, or a background thread for a whole run."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Protocol, Self, TypeVar

Answer = TypeVar("Answer")
END_S = 60.0
"""Seconds for cancelled tasks to end, including the closing of environments."""


class Loop(Protocol):
    """The event loop of a generator's phases."""

    def run(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        """Runs a coroutine to its end and returns the result. Raises the coroutine's exception."""

    def __exit__(self, *_: object) -> None:
        """Cancels all running tasks."""


class ServiceLoop(Loop, Protocol):
    """A loop that keeps running between the calls of another thread: `BackgroundLoop`, or virtual time."""

    def start(self, work: Coroutine[Any, Any, Any]) -> object:
        """Starts a coroutine in the loop without waiting and returns the task or its future."""

    def call(self, function: Callable[..., object], *args: object) -> None:
        """Schedules a call of the function in the loop's thread; does not wait."""

    def wait(self, ready: Callable[[], bool], seconds: float) -> None:
        """Blocks the calling thread until `ready()` is true or `seconds` are over; neither case is an error. `ready` is
        called again after each `changed`."""

    def changed(self) -> None:
        """Makes `wait` check `ready` again; called in the loop after a change."""


class EventLoop:
    """An event loop for coroutines run one after another, each as by `asyncio.run`. The loop ends with the `with`
    block.

    Long-lived objects, such as a pool of environments, can therefore be used in every phase.
    """

    def __init__(self) -> None:
        self._runner = asyncio.Runner()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.close()

    def run(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        """Runs a coroutine to its end and returns the result, or raises its exception. Other tasks left running are
        cancelled and have ended on return."""
        return self._runner.run(_alone(work))


async def _alone(work: Coroutine[Any, Any, Answer]) -> Answer:
    try:
        return await work
    finally:
        await _cancel_others()


class BackgroundLoop:
    """An event loop in a background thread. Phases and other coroutines run there concurrently.

    The loop ends with the `with` block, and running tasks are cancelled then.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run_forever, name="rollouts", daemon=True)
        self._thread.start()

    def _run_forever(self) -> None:
        while True:
            try:
                return self._loop.run_forever()
            except (SystemExit, KeyboardInterrupt):  # raised by user code; the task that awaits the code gets it
                continue

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(TimeoutError):  # a task that takes longer ends with the process
            self.start(_cancel_others()).result(END_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        """Runs a coroutine while the calling thread waits, and returns the result or raises its exception. The wait has
        no limit. Other tasks keep running. If the wait is interrupted, the coroutine is cancelled."""
        future = self.start(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def start(self, work: Coroutine[Any, Any, Answer]) -> Future[Answer]:
        """Starts a coroutine in the loop's thread without waiting, and returns the future of its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, function: Callable[..., object], *args: object) -> None:
        """Schedules a call of the function in the loop's thread; does not wait."""
        self._loop.call_soon_threadsafe(function, *args)

    def wait(self, ready: Callable[[], bool], seconds: float) -> None:
        """Blocks the calling thread until `ready()` is true or `seconds` are over; neither case is an error. Code
        changing the condition must call `changed`."""
        with self._changed:
            self._changed.wait_for(ready, seconds)

    def changed(self) -> None:
        """Makes `wait` check `ready` again; called in the loop's thread after a change."""
        with self._changed:
            self._changed.notify_all()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


async def cancel_all(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancels tasks and waits for their ends. Exceptions of the tasks are ignored."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
