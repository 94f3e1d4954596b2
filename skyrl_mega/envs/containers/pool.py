"""A limit of containers at once: the containers above the limit wait in order, and waiting does not count as time of a
step."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Mapping

from skyrl_mega.common.limits import CONTAINERS
from skyrl_mega.envs import event_loop
from skyrl_mega.envs.containers.removal import start_removal
from skyrl_mega.envs.containers.runtime import Container, Runtime
from skyrl_mega.envs.faults import InfrastructureFault
from skyrl_mega.envs.options import Option, number, whole
from skyrl_mega.envs.waiting import waiting

OPTIONS: Mapping[str, Option] = {
    "containers": whole(CONTAINERS, "containers at once, for each process that runs trajectories; others wait", low=1),
    "pull_timeout_s": number(1800.0, "for the pull of an image", above=0, high=86400),
}
"""Options of the pool, beside the options of the runtime."""
REMOVAL_S = 30.0
"""Seconds for which a trajectory waits for the removal of its container; then the removal continues in the
background."""
MARGIN_S = 300.0
"""Seconds added to the lifetime of a container, after which a slot must have become free."""


class TurnQueue:
    """A number of equal places, given to threads in the order of their requests.

    Args:
        limit: Number of places.
    """

    def __init__(self, limit: int) -> None:
        self._free, self._lock = limit, threading.Lock()
        self._queue: deque[threading.Event] = deque()
        self._progress = time.monotonic()

    def take(self, patience_s: float) -> None:
        """Waits for a place; `give_back` must follow. The wait does not count as time of the environment's step.

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


class ContainerPool:
    """A runtime with a limit of containers at once for this process.

    Args:
        runtime: The runtime that starts the containers.
        name: Name of the runtime; pools of a name and a limit share the places.
        limit: Maximum number of containers.
        lifetime_s: Seconds after which a container ends by itself.
        pull_timeout_s: Time limit of a pull in seconds.
    """

    def __init__(self, runtime: Runtime, name: str, limit: int, lifetime_s: float, pull_timeout_s: float) -> None:
        self.runtime, self.patience_s, self._pull_timeout_s = runtime, lifetime_s + MARGIN_S, pull_timeout_s
        self.slots = _slots.setdefault((os.getpid(), name, limit), TurnQueue(limit))

    def pull(self, image: str) -> None:
        """Makes the image available within `pull_timeout_s`, and returns at once if it is. The time does not count as
        time of the environment's step.

        Raises:
            UserError: There is no such image, its registry refuses access, or the runtime has no folder for it.
            InfrastructureFault: The registry cannot be reached, or the time limit has passed.
        """
        with waiting():
            self.runtime.pull(image, self._pull_timeout_s)

    def place(self) -> ContainerPlace:
        """Returns a place for the containers of a trajectory, one after the other. No wait yet."""
        return ContainerPlace(self)


class ContainerPlace:
    """The right to one container at a time, for the length of a trajectory: the policy's container, then containers for
    the tests. Trajectories that hold a place never wait for each other.

    Args:
        pool: The pool.
    """

    def __init__(self, pool: ContainerPool) -> None:
        self._pool, self._taken = pool, False
        self._removals: list[threading.Thread] = []

    def start(self, image: str, timeout_s: float) -> Container:
        """Pulls the image, if it is missing, starts a container and returns it. The first call waits for the place
        before. The wait and the pull count as waiting, not as time of the step.

        The caller gives the container to `remove` before the next start, and before `close`.

        Args:
            image: Name of the image.
            timeout_s: Time limit of the start in seconds; the wait and the pull have limits of the pool.

        Raises:
            UserError: There is no such image, its registry refuses access, or the runtime has no folder for it.
            InfrastructureFault: No place becomes free, the pull fails or is late, or the container does not start.
        """
        if not self._taken:
            self._pool.slots.take(self._pool.patience_s)
            self._taken = True
        self._pool.pull(image)
        return self._pool.runtime.start(image, timeout_s)

    def remove(self, container: Container) -> None:
        """Removes a container of this place. Counts as waiting, and ends after at most `REMOVAL_S` seconds: a slower or
        failed removal continues in the background and raises nothing, as the policy can cause both."""
        removal = start_removal(container)
        self._removals.append(removal)
        with waiting():
            removal.join(REMOVAL_S)

    def close(self) -> None:
        """Gives the place back once its containers are gone; does not wait for that. May be called again, and before
        the first start."""
        if not self._taken:
            return
        self._taken, removals, self._removals = False, self._removals, []
        if any(removal.is_alive() for removal in removals):
            threading.Thread(target=self._give_back_after, args=(removals,), daemon=True).start()
        else:
            self._pool.slots.give_back()

    def _give_back_after(self, removals: list[threading.Thread]) -> None:
        for removal in removals:
            removal.join()
        self._pool.slots.give_back()


_slots: dict[tuple[int, str, int], TurnQueue] = {}
