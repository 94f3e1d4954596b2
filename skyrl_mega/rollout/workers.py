"""The processes that play trajectories, as the driver sees them: which are up, and what becomes of one that dies."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from skyrl_mega.cluster.errors import ActorFailed
from skyrl_mega.cluster.group import ActorGroup
from skyrl_mega.cluster.last_words import with_cause
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.rollout.suspects import SUSPECTED, TRIALS, Loss, admitted, digest


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
        self.guilty: dict[int, set[int]] = {}
        """Prompts of trajectories that ended their workers: by `uid`, which is a row of a data set, what is in them."""
        self._open: dict[int, list[int]] = {}
        """By actor the deaths under each trajectory that it has, of all sessions."""
        self._losses: dict[int, tuple[Any, Loss]] = {}
        """By rank the last one that was lost there."""
        self._apart: set[str] = set()
        """Suspected trajectories that wait for a worker."""
        self._trials = 0
        self._no_restarts = restarts == 0
        """Whether nobody is started again, whatever comes to light."""
        self._owed = 0
        """Restarts taken while none was left, one a worker at most: what is suspected may yet explain them."""
        self._starting: dict[int, Future[None]] = {}
        self._gone: set[int] = set()
        """Those that are not started again."""
        self._last: ActorFailed | None = None
        self._closed = False
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

    def is_guilty(self, prompt: Prompt) -> bool:
        """Whether a trajectory of this prompt has ended its workers."""
        return prompt.uid in self.guilty and digest(prompt) in self.guilty[prompt.uid]  # many ask, again and again

    def place(self, up: Mapping[int, Any], name: str, deaths: int) -> int | None:
        """Gives a trajectory to one of these, by rank: to the one with the least to do of those that may have it
        (`suspects`). Returns its rank; None if none may now. It has the trajectory until `closed`."""
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
        """It waits for no worker any more."""
        with self._lock:
            self._apart.discard(name)

    def closed(self, actor: Any, deaths: int) -> None:
        """A worker has one less, under which so many had died."""
        with self._lock:
            there = self._open[id(actor)]
            there.remove(deaths)
            if not there:
                del self._open[id(actor)]

    def lost(self, rank: int, actor: Any, cause: str, *, heard: bool = False) -> Loss | None:
        """One does not answer any more. It is ended and started again, unless another is in its place already; one that
        had `heard` of trajectories and had nothing but suspected ones was a trial.

        Returns what it had when the first of all sessions told that it is lost: they take theirs away at once. None of
        one that was lost long ago.
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
        """One that has failed has ended these. Where there are restarts again, who is gone comes back."""
        with self._lock:
            for loss in losses:
                if not loss.trial:
                    loss.trial = True
                    self._trial()
            if self._closed or len(self._gone) == len(self.group):  # the run ends
                return
            while self.restarts > 0 and self._gone:
                rank = self._gone.pop()
                self.restarts -= 1
                name = f"{self.group.name}-{rank}"
                self._start(rank, f"{name} is started again after all ({self.restarts} restarts are left)")

    def _trial(self) -> None:
        """One more: it takes no restart, unless so many have not."""
        self._trials += 1
        if self._trials % TRIALS and not self._no_restarts:
            if self._owed:
                self._owed -= 1
            else:
                self.restarts += 1

    def _suspects(self) -> bool:
        """Whether any are played, or are to be."""
        return bool(self._apart) or any(deaths >= SUSPECTED for there in self._open.values() for deaths in there)

    def _start(self, rank: int, told: str) -> None:
        self.say(told)
        self._starting[rank] = self._threads.submit(self.group.replace, rank, self.start_timeout_s)

    def close(self) -> None:
        """Starts nothing more. The actors are the group's to end."""
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
