"""The driver's view of the rollout workers: placement of trajectories, crashes and restarts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from skyrl_mega.cluster.errors import ActorFailed
from skyrl_mega.cluster.group import ActorGroup
from skyrl_mega.cluster.last_words import with_cause
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.rollout.crash_isolation import SUSPECTED, TRIALS, Loss, admitted, digest


class Workers:
    """A group of `worker.RolloutWorker` actors. A crashed worker is restarted in the background; the other workers keep
    running.

    Args:
        group: The actors, all of them running.
        restarts: Restart budget of the whole group.
        start_timeout_s: Seconds until a restarted worker must be up.
        say: Prints a message for the user.
    """

    def __init__(
        self, group: ActorGroup, *, restarts: int, start_timeout_s: float, say: Callable[[str], None] = print
    ) -> None:
        self.group, self.restarts, self.start_timeout_s, self.say = group, restarts, start_timeout_s, say
        self.guilty: dict[int, set[int]] = {}
        """uid → content hashes of the prompts whose trajectories crashed workers. The `uid` is a row number of one data
        set."""
        self._open: dict[int, list[int]] = {}
        """Actor id → earlier crashes of each trajectory on the actor, over all sessions."""
        self._losses: dict[int, tuple[Any, Loss]] = {}
        """Rank → the actor of the last crash there, and the crash."""
        self._apart: set[str] = set()
        """Names of suspects waiting for a worker."""
        self._trials = 0
        self._no_restarts = restarts == 0
        """True if no worker is ever restarted (`rollout.restarts` is 0)."""
        self._owed = 0
        """Restarts made beyond the budget while a crash is being isolated, at most one per worker."""
        self._starting: dict[int, Future[None]] = {}
        self._gone: set[int] = set()
        """Ranks of workers that are not restarted."""
        self._last: ActorFailed | None = None
        self._closed = False
        self._threads = ThreadPoolExecutor(len(group), thread_name_prefix="restart-rollout")
        self._lock = threading.RLock()
        """Serialises a phase and a service, which may detect the same crash in two event loops."""

    def up(self) -> dict[int, Any]:
        """Returns rank → actor of the running workers; empty while all workers are starting.

        Raises:
            ActorFailed: No worker is left and none restarts; with the root cause.
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

    def is_guilty(self, prompt: Prompt) -> bool:
        """Returns True if a trajectory of this prompt was found to crash workers."""
        # cheap test first: every waiting trajectory polls this
        return prompt.uid in self.guilty and digest(prompt) in self.guilty[prompt.uid]

    def place(self, up: Mapping[int, Any], name: str, deaths: int) -> int | None:
        """Assigns a trajectory to the least loaded running worker allowed by the rules of `crash_isolation`.
        Returns the worker's rank, or None if no worker may run the trajectory now. The assignment lasts until
        `closed`."""
        with self._lock:
            (self._apart.add if deaths >= SUSPECTED else self._apart.discard)(name)
            for i, rank in enumerate(sorted(up, key=lambda rank: len(self._open.get(id(up[rank]), ())))):
                there = self._open.get(id(up[rank]), [])
                if admitted(deaths, there, reserved=i == 0 and bool(self._apart)):
                    self._open.setdefault(id(up[rank]), there).append(deaths)
                    self._apart.discard(name)
                    return rank
            return None

    def placed(self, name: str) -> None:
        """Removes a trajectory from the waiting suspects."""
        with self._lock:
            self._apart.discard(name)

    def closed(self, actor: Any, deaths: int) -> None:
        """Ends the assignment of a trajectory with `deaths` earlier crashes to a worker."""
        with self._lock:
            there = self._open[id(actor)]
            there.remove(deaths)
            if not there:
                del self._open[id(actor)]

    def lost(self, rank: int, actor: Any, cause: str, *, heard: bool = False) -> Loss | None:
        """Handles a crashed or silent worker: ends and restarts the actor, unless another actor already took the rank.
        The crash is a probe if the worker had received trajectories (`heard`), all of these suspects.

        Returns the crash as the first session recorded it, since every session removes all trajectories of the worker
        at once. Returns None for an actor lost long ago.
        """
        with self._lock:
            if not self._closed and rank not in self._gone | self._starting.keys() and self.group.actors[rank] == actor:
                there = [*self._open.get(id(actor), ())]
                loss = Loss(there, heard and min(there, default=0) >= SUSPECTED)
                self._losses[rank] = actor, loss
                if loss.trial:
                    self._trial()
                self._replace(rank, cause, suspects=heard and max(there, default=0) + 1 >= SUSPECTED)
            of, loss = self._losses.get(rank, (None, Loss([], False)))
            return loss if of is actor else None

    def explained(self, losses: Sequence[Loss]) -> None:
        """Turns the crashes of a failed trajectory into probes. Restarts gained this way bring back workers given up
        before."""
        with self._lock:
            for loss in losses:
                if not loss.trial:
                    loss.trial = True
                    self._trial()
            if self._closed or len(self._gone) == len(self.group):
                return
            while self.restarts > 0 and self._gone:
                rank = self._gone.pop()
                self.restarts -= 1
                name = f"{self.group.name}-{rank}"
                self._start(rank, f"{name} is started again after all ({self.restarts} restarts are left)")

    def _trial(self) -> None:
        """Counts a probe. The restart already taken is refunded, except for every `TRIALS`-th probe."""
        self._trials += 1
        if self._trials % TRIALS and not self._no_restarts:
            if self._owed:
                self._owed -= 1
            else:
                self.restarts += 1

    def _suspects(self) -> bool:
        """Returns True if any suspect is running or waiting."""
        return bool(self._apart) or any(deaths >= SUSPECTED for there in self._open.values() for deaths in there)

    def _start(self, rank: int, told: str) -> None:
        self.say(told)
        self._starting[rank] = self._threads.submit(self.group.replace, rank, self.start_timeout_s)

    def close(self) -> None:
        """Prevents further restarts. The group itself ends the actors."""
        with self._lock:
            self._closed = True
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _replace(self, rank: int, cause: str, *, suspects: bool = False) -> None:
        log = self.group.logs[rank]
        name, cause = f"{self.group.name}-{rank}", with_cause(cause, log)
        self._last = ActorFailed(name, rank, "play", f"{cause}; its log: {log}")
        told = f"{name} is lost: {cause}; what it had is played again"
        if self.restarts > 0:
            self.restarts -= 1
            self._start(rank, f"{told}, and it is started again ({self.restarts} restarts are left)")
        elif not self._no_restarts and self._owed < len(self.group) and (suspects or self._suspects()):
            self._owed += 1
            self._start(rank, f"{told}, and it is started again though no restart is left: a cause is being looked for")
        else:
            self._gone.add(rank)
            self._threads.submit(self.group.end, rank)
            self.say(f"{told}; no restart is left (rollout.restarts)")
