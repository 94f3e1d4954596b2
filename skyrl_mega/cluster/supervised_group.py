"""Supervision of a group of actors: the state of each rank, and restarts in the background after failures.

An actor is UP while it runs. After a failure the actor's processes are ended; a replacement is STARTING in the
background, or the rank is GIVEN_UP once the restart budget of the group is used up. The other actors keep running.
Engines (`cluster.fleet`) and rollout workers (`rollout.workers`) are supervised groups.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from enum import Enum
from typing import Any

from skyrl_mega.cluster.errors import ActorFailed, describe
from skyrl_mega.cluster.group import ActorGroup
from skyrl_mega.telemetry.events import Event


class State(Enum):
    """Life-cycle state of an actor."""

    UP = "up"
    """The actor runs."""
    STARTING = "starting"
    """A replacement of a failed actor starts in the background."""
    GIVEN_UP = "given up"
    """The actor failed and is not restarted."""
    JOINING = "joining"
    """An actor added to the group starts in the background."""
    LEAVING = "leaving"
    """The actor gets no new work and will be ended."""
    GONE = "gone"
    """The actor has left the group for good. The rank is not used again."""


ALIVE = (State.UP, State.STARTING, State.JOINING)
"""States of actors that run or will run."""
MOST_THREADS = 256
"""Largest number of background threads of a group; a thread exists only once needed."""


class SupervisedGroup:
    """Interchangeable actors, each with a rank. All of them must be running when the group is created.

    Args:
        group: The actors.
        restarts: Restart budget of the whole group.
        start_timeout_s: Seconds until a restarted actor is up.
        say: Prints a message for the user.
    """

    lost_note = ""
    """Sentence in the message about a failed actor."""
    back_note = ""
    """End of the message about a restarted actor."""

    def __init__(
        self, group: ActorGroup, *, restarts: int, start_timeout_s: float, say: Callable[[str], None] = print
    ) -> None:
        self.group, self.restarts, self.start_timeout_s, self.say = group, restarts, start_timeout_s, say
        self.states = [State.UP] * len(group)
        self.last_failure: ActorFailed | None = None
        self._starting: dict[int, Future[None]] = {}
        self._threads = ThreadPoolExecutor(MOST_THREADS, thread_name_prefix=f"restart-{group.name}")
        self._closed = False
        self._lock = threading.RLock()
        """Guards states and restarts: several threads and event loops may detect the same failure at the same time."""

    @property
    def up(self) -> list[int]:
        """Ranks with state UP, in order."""
        return self.ranks(State.UP)

    def ranks(self, *states: State) -> list[int]:
        """Returns the ranks of the actors in these states, in order."""
        return [rank for rank, present in enumerate(self.states) if present in states]

    def running(self) -> dict[int, Any]:
        """Takes finished restarts into service, and returns rank → actor of the running actors. Does not wait.

        The result is empty if no actor runs yet, but at least one starts. Prints a message for each finished restart. A
        failed restart counts as a new failure of the rank (`retire`): the rank restarts again, or is given up.

        Raises:
            ActorFailed: Every actor is given up, or was removed from the group; names the root cause of the last
                failure.
        """
        with self._lock:
            for rank, starting in list(self._starting.items()):
                if starting.done():
                    self._finish_restart(rank, starting.exception())
            if not self.ranks(*ALIVE):
                why = f"every {self.group.name} has left the group; resume the run to start new actors"
                failure = self.last_failure or ActorFailed(self.group.name, None, "service", why)
                raise failure.with_traceback(None)  # else the frames of all callers would add up
            return {rank: self.group.actors[rank] for rank in self.up}

    def _finish_restart(self, rank: int, error: BaseException | None) -> None:
        del self._starting[rank]
        self.states[rank] = State.UP
        if error is not None:
            self.retire(rank, error)
            return
        name = f"{self.group.name}-{rank}"
        self.say(Event("actor_back", f"{name} restarted{self.back_note}", actor=name, rank=rank))

    def retire(self, rank: int, error: BaseException | str) -> None:
        """Takes a running actor out of service, ends its processes and starts a replacement in the background; prints
        the failure. Without a restart left, gives the rank up: the processes end, and nothing is started. Does nothing
        if the rank is not UP.

        Args:
            rank: The actor's rank.
            error: The failure, or a text about the failure.
        """
        with self._lock:
            if self.states[rank] is not State.UP:
                return
            failure = ActorFailed(self.group.name, rank, "service", describe(error), log=self.group.logs[rank])
            self.last_failure, restart = failure, self._spend(rank)
            self.states[rank] = State.STARTING if restart else State.GIVEN_UP
            if self._closed:
                return
            kind = "actor_lost" if restart else "actor_given_up"
            left = max(0, self._budget(rank))
            if not restart:
                then = "No restart is left (rollout.restarts)."
            elif self._budget(rank) < 0:
                then = "Restarting it beyond the budget (rollout.restarts), to isolate the cause."
            else:
                then = f"Restarting it ({left} restarts left)."
            text = f"{failure.actor} is out of service: {failure.cause}. {self.lost_note}{then}"
            self.say(Event(kind, text, **failure.facts, restarts_left=left))
            if restart:
                self._restart(rank)
            else:
                self._threads.submit(self.group.end, rank)

    def _spend(self, rank: int) -> bool:
        """Takes a restart for this rank from the budget; returns False if none is left."""
        restart = self.restarts > self._lowest(rank) and not self._closed
        self.restarts -= restart
        return restart

    def _budget(self, rank: int) -> int:
        """Returns the restarts left for this rank."""
        return self.restarts

    def _lowest(self, rank: int) -> int:
        """Returns the value of `restarts` at which this rank is given up; below 0 if it may exceed the budget."""
        return 0

    def _restart(self, rank: int) -> None:
        """Replaces an actor in the background."""
        self._starting[rank] = self._threads.submit(self.group.replace, rank, self.start_timeout_s)

    def close(self) -> None:
        """Prevents further restarts, without waiting for running ones. Ends no actor; `ActorGroup.shutdown` does."""
        with self._lock:
            self._closed = True
            self._threads.shutdown(wait=False, cancel_futures=True)
