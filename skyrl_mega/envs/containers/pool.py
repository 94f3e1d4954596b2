"""A limit of containers at once: the containers above the limit wait in order, and waiting does not count as time of a
step."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from skyrl_mega.envs import event_loop
from skyrl_mega.envs.containers.runtime import CommandOutput, Container, Runtime
from skyrl_mega.envs.faults import InfrastructureFault
from skyrl_mega.envs.options import Option, whole
from skyrl_mega.envs.waiting import waiting

OPTIONS: Mapping[str, Option] = {
    "containers": whole(64, "containers at once, for each process that runs trajectories; others wait", low=1),
}
"""Options of the pool, beside the options of the runtime."""
MARGIN_S = 300.0
"""Seconds added to the lifetime of a container, after which a slot must have become free."""


class Slots:
    """A number of equal places, given to threads in the order of their requests.

    Args:
        limit: Number of places.
    """

    def __init__(self, limit: int) -> None:
        self._free, self._lock = limit, threading.Lock()
        self._queue: deque[threading.Event] = deque()
        self._progress = time.monotonic()

    def take(self, patience_s: float) -> None:
        """Waits for a place.

        Args:
            patience_s: Seconds without any place becoming free, after which the wait ends.

        Raises:
            InfrastructureFault: No place has become free for `patience_s` seconds, or the run gave up on the step.
        """
        turn = threading.Event()
        with self._lock:
            if self._free and not self._queue:
                self._free -= 1
                return
            if not self._queue:
                self._progress = time.monotonic()
            self._queue.append(turn)
        cancelled = threading.Event()

        def cancel() -> None:
            cancelled.set()
            self._leave(turn)

        with waiting(), event_loop.on_cancel(cancel):
            while not turn.wait(max(0.01, self._progress + patience_s - time.monotonic())):
                if time.monotonic() >= self._progress + patience_s and self._leave(turn):
                    raise InfrastructureFault(f"no container has ended for {patience_s:.0f} seconds")
        if cancelled.is_set():
            raise InfrastructureFault("the run gave up waiting for a container")

    def _leave(self, turn: threading.Event) -> bool:
        """Takes a thread out of the queue and wakes the thread; returns False if the thread has a place already."""
        with self._lock:
            if turn not in self._queue:
                return False
            self._queue.remove(turn)
            turn.set()
            return True

    def give_back(self) -> None:
        """Frees a place; the first thread of the queue gets it."""
        with self._lock:
            self._progress = time.monotonic()
            if self._queue:
                self._queue.popleft().set()
            else:
                self._free += 1


class PooledRuntime:
    """A runtime with a limit of containers at once for this process. Satisfies the contract `Runtime`.

    Args:
        runtime: The runtime that starts the containers.
        name: Name of the runtime; runtimes of a name share the limit.
        limit: Maximum number of containers.
        lifetime_s: Seconds after which a container ends by itself.
    """

    def __init__(self, runtime: Runtime, name: str, limit: int, lifetime_s: float) -> None:
        self.runtime, self._patience_s = runtime, lifetime_s + MARGIN_S
        self._slots = _slots.setdefault((os.getpid(), name, limit), Slots(limit))

    def check(self, key: str) -> None:
        """Checks that the runtime works on this machine (`Runtime.check`)."""
        self.runtime.check(key)

    def pull(self, image: str, timeout_s: float) -> None:
        """Makes the image available (`Runtime.pull`); counts as waiting."""
        with waiting():
            self.runtime.pull(image, timeout_s)

    def start(self, image: str, timeout_s: float) -> PooledContainer:
        """Waits for a place and starts a container (`Runtime.start`).

        Args:
            image: An available image.
            timeout_s: Time limit of the start in seconds, without the wait for a place.

        Raises:
            InfrastructureFault: The container does not start, or no container has ended for more than a lifetime.
        """
        self._slots.take(self._patience_s)
        try:
            return PooledContainer(self.runtime.start(image, timeout_s), self._slots)
        except BaseException:
            self._slots.give_back()
            raise


class PooledContainer:
    """A container that occupies a place of the pool until its removal.

    Attributes:
        container: The container of the runtime.
    """

    def __init__(self, container: Container, slots: Slots) -> None:
        self.container = container
        self._slots: Slots | None = slots

    def run(self, argv: Sequence[str], timeout_s: float, **arguments: Any) -> CommandOutput:
        """Runs a program in the container (`Container.run`)."""
        return self.container.run(argv, timeout_s, **arguments)

    def end_processes(self, timeout_s: float) -> None:
        """Kills all processes in the container (`Container.end_processes`)."""
        self.container.end_processes(timeout_s)

    def remove(self, timeout_s: float) -> None:
        """Removes the container and frees its place; may be called again. A container that cannot be removed frees its
        place too: its lifetime ends the container."""
        try:
            self.container.remove(timeout_s)
        finally:
            slots, self._slots = self._slots, None
            if slots is not None:
                slots.give_back()


_slots: dict[tuple[int, str, int], Slots] = {}
