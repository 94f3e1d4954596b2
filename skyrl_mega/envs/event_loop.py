"""An event loop for coroutines of user code, one for each process, in a thread of its own.

A module-global client or semaphore belongs to the event loop of its first use, so all calls of a process share a loop.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any

_thread = threading.local()


class Pending:
    """The coroutine that a thread waits for in `wait`; another thread may cancel it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._future: Future[Any] | None = None
        self._cancelled = False

    def run_here(self) -> None:
        """Makes later calls of `wait` in the current thread cancellable by `cancel` of this object."""
        _thread.pending = self

    def hold(self, future: Future[Any]) -> None:
        """Keeps the future of a coroutine for `cancel`; cancels the future at once after an earlier `cancel`."""
        with self._lock:
            self._future = future
            cancelled = self._cancelled
        if cancelled:
            future.cancel()

    def cancel(self) -> None:
        """Cancels the coroutine, and later coroutines of the thread; callable from any thread."""
        with self._lock:
            self._cancelled = True
            future = self._future
        if future is not None:
            future.cancel()


class _SharedLoop:
    """The event loop of this process, started on first use; a forked process starts a new loop."""

    def __init__(self) -> None:
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def get(self) -> asyncio.AbstractEventLoop:
        """Returns the running loop."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_run_forever, args=(self._loop,), name="user-coroutines", daemon=True).start()
            return self._loop


_shared = _SharedLoop()


def wait(awaitable: Awaitable[Any]) -> Any:
    """Returns the result of an awaitable, which runs in the process's event loop while this thread waits. Not to be
    called in that loop: it would wait forever.

    Raises:
        BaseException: The awaitable raised it; `CancelledError` after `Pending.cancel`.
    """
    future = asyncio.run_coroutine_threadsafe(_result(awaitable), _shared.get())
    pending: Pending | None = getattr(_thread, "pending", None)
    if pending is not None:
        pending.hold(future)
    try:
        return future.result()
    finally:
        future.cancel()  # no effect on a finished coroutine


@contextmanager
def on_cancel(stop: Callable[[], None]) -> Iterator[None]:
    """Calls `stop` if another thread gives up waiting for the current thread (`Pending.cancel`), in the `with` block.
    In a thread without `Pending.run_here` never calls `stop`.

    Args:
        stop: Ends the work of the current thread; called at most once, in the other thread, or in this thread if the
            cancellation came before the block.
    """
    pending: Pending | None = getattr(_thread, "pending", None)
    if pending is None:
        yield
        return
    future: Future[None] = Future()
    future.add_done_callback(lambda ended: stop() if ended.cancelled() else None)
    pending.hold(future)
    try:
        yield
    finally:
        future.set_running_or_notify_cancel()  # a later `cancel` has no effect


async def _result(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


def _run_forever(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    while True:
        with suppress(SystemExit, KeyboardInterrupt):  # raised by user code; `wait` raises it in the caller's thread
            loop.run_forever()
