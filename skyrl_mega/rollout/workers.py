"""The processes that play trajectories, as the driver sees them: which are up, and what becomes of one that dies."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from skyrl_mega.cluster.errors import ActorFailed
from skyrl_mega.cluster.group import ActorGroup
from skyrl_mega.cluster.last_words import with_cause
from skyrl_mega.rollout.suspects import TRIALS


class Workers:
    """A group of `worker.RolloutWorker`. One that dies is started again in the background, and the others go on.

    Args:
        group: All of them are up.
        restarts: How many may be started again, all in all.
        start_timeout_s: Seconds until one is up again.
        say: Tells a person what happens.
    """

    def __init__(
        self, group: ActorGroup, *, restarts: int, start_timeout_s: float, say: Callable[[str], None] = print
    ) -> None:
        self.group, self.restarts, self.start_timeout_s, self.say = group, restarts, start_timeout_s, say
        self.guilty: set[int] = set()
        """Prompts of trajectories that ended their workers (`suspects`)."""
        self._open, self._trials = Counter[int](), 0
        self._starting: dict[int, Future[None]] = {}
        self._gone: set[int] = set()
        """Those that are not started again."""
        self._last: ActorFailed | None = None
        self._threads = ThreadPoolExecutor(len(group), thread_name_prefix="restart-rollout")
        self._lock = threading.RLock()
        """A phase and a service may find at the same time that one is dead, in loops of their own."""

    def up(self) -> dict[int, Any]:
        """The actors that can be asked, by rank; none while all are being started.

        Raises:
            ActorFailed: There are none, and none comes back; the root cause.
        """
        with self._lock:
            for rank, starting in list(self._starting.items()):
                if starting.done():
                    del self._starting[rank]
                    if (error := starting.exception()) is None:
                        self.say(f"{self.group.name}-{rank} is up again")
                    else:
                        self._replace(rank, f"{type(error).__name__}: {error}")
            if self._last is not None and len(self._gone) == len(self.group):
                raise self._last
            missing = self._gone | self._starting.keys()
            return {rank: actor for rank, actor in enumerate(self.group.actors) if rank not in missing}

    def opened(self, actor: Any, more: int = 0) -> int:
        """How many trajectories a worker has, those of all sessions, now that there are more."""
        with self._lock:
            self._open[id(actor)] += more
            return self._open[id(actor)]

    def lost(self, rank: int, actor: Any, cause: str, *, trial: bool = False) -> None:
        """One does not answer any more. It is ended and started again, unless another is in its place already; a
        `trial` had nothing but suspected trajectories."""
        with self._lock:
            if rank not in self._gone | self._starting.keys() and self.group.actors[rank] == actor:
                self._trials += trial
                if trial and self._trials % TRIALS:
                    self.restarts += 1  # which takes none
                self._replace(rank, cause)

    def close(self) -> None:
        """Starts nothing more. The actors are the group's to end."""
        self.restarts = 0
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _replace(self, rank: int, cause: str) -> None:
        log = self.group.logs[rank]
        name, cause = f"{self.group.name}-{rank}", with_cause(cause, log)
        self._last = ActorFailed(name, rank, "play", f"{cause}; its log: {log}")
        told = f"{name} is lost: {cause}; what it had is played again"
        if self.restarts > 0:
            self.restarts -= 1
            self.say(f"{told}, and it is started again ({self.restarts} restarts are left)")
            self._starting[rank] = self._threads.submit(self.group.replace, rank, self.start_timeout_s)
        else:
            self._gone.add(rank)
            self._threads.submit(self.group.end, rank)
            self.say(f"{told}; no restart is left (rollout.restarts)")
