"""The driver's view of the rollout workers: placement of trajectories, crashes and restarts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from skyrl_mega.cluster.errors import ActorFailed
from skyrl_mega.cluster.group import ActorGroup
from skyrl_mega.cluster.log_errors import with_cause
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.rollout.crash_isolation import EXPLAINED_PER_RESTART, CrashHistory, prompt_hash
from skyrl_mega.telemetry.events import Event


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
        self.crashing_prompts: dict[int, set[int]] = {}
        """uid → content hashes of the prompts whose trajectories crashed workers. The `uid` is a row number of one data
        set."""
        self._running: dict[int, list[CrashHistory]] = {}
        """Actor id → trajectories on the actor, over all sessions; a quarantined trajectory is the only one."""
        self._waiting: set[CrashHistory] = set()
        """Quarantined trajectories that wait for a worker."""
        self._unexplained: list[Any] = []
        """Crashed actors whose crash is not known to be caused by a single trajectory."""
        self._explained = 0
        """Number of explained crashes."""
        self._lowest = -len(group) if restarts else 0
        """Value of `restarts` at which no worker is restarted any more: below 0, as a crash being isolated may use
        restarts beyond the budget."""
        self._starting: dict[int, Future[None]] = {}
        self._given_up: set[int] = set()
        """Ranks of workers that are not restarted."""
        self._last_error: ActorFailed | None = None
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
                        name = f"{self.group.name}-{rank}"
                        self.say(Event("actor_back", f"{name} restarted", actor=name, rank=rank))
                    else:
                        self._replace(rank, f"{type(error).__name__}: {error}")
            if self._last_error is not None and len(self._given_up) == len(self.group):
                raise self._last_error
            missing = self._given_up | self._starting.keys()
            return {rank: actor for rank, actor in enumerate(self.group.actors) if rank not in missing}

    def is_crashing(self, prompt: Prompt) -> bool:
        """Returns True if a trajectory of this prompt was found to crash workers."""
        # cheap test first: every waiting trajectory polls this
        return prompt.uid in self.crashing_prompts and prompt_hash(prompt) in self.crashing_prompts[prompt.uid]

    def place(self, up: Mapping[int, Any], trajectory: CrashHistory) -> int | None:
        """Assigns a trajectory to the least loaded running worker allowed by the rules of `crash_isolation`.

        The assignment lasts until `finished`.

        Args:
            up: Result of `up`: rank → actor of the running workers.
            trajectory: The trajectory's crash history, also its identity.

        Returns:
            The worker's rank; None if no worker may run the trajectory now.
        """
        with self._lock:
            (self._waiting.add if trajectory.quarantined else self._waiting.discard)(trajectory)
            for i, rank in enumerate(sorted(up, key=lambda rank: len(self._running.get(id(up[rank]), ())))):
                running = self._running.get(id(up[rank]), [])
                reserved = i == 0 and bool(self._waiting)
                if not running if trajectory.quarantined else not reserved and not _quarantined(running):
                    self._running[id(up[rank])] = [*running, trajectory]
                    self._waiting.discard(trajectory)
                    return rank
            return None

    def cancel_wait(self, trajectory: CrashHistory) -> None:
        """Removes a trajectory from the waiting ones."""
        with self._lock:
            self._waiting.discard(trajectory)

    def finished(self, actor: Any, trajectory: CrashHistory) -> None:
        """Ends the assignment of a trajectory to a worker."""
        with self._lock:
            running = self._running[id(actor)]
            running.remove(trajectory)
            if not running:
                del self._running[id(actor)]

    def crashed(self, rank: int, actor: Any, cause: str, *, received: bool = False) -> None:
        """Handles a crashed or silent worker: ends and restarts the actor, unless another session already did.

        Args:
            rank: Rank of the worker.
            actor: The actor of the crash.
            cause: Description of the crash.
            received: True if the worker had received trajectories.
        """
        with self._lock:
            if self._closed or rank in self._given_up | self._starting.keys() or self.group.actors[rank] != actor:
                return
            running = self._running.get(id(actor), []) if received else []
            self._unexplained.append(actor)
            if _quarantined(running):
                self._refund([actor])
            isolating = bool(self._waiting) or any(map(_quarantined, self._running.values()))
            self._replace(rank, cause, isolating or any(trajectory.workers for trajectory in running))

    def explain(self, trajectory: CrashHistory) -> None:
        """Marks all crashes of a failed trajectory as explained. Restarts gained this way bring back workers given up
        before."""
        with self._lock:
            self._refund(trajectory.workers)
            if self._closed or len(self._given_up) == len(self.group):
                return
            while self.restarts > 0 and self._given_up:
                rank = self._given_up.pop()
                self.restarts -= 1
                name = f"{self.group.name}-{rank}"
                self._start(rank, f"{name} is restarted after all ({self.restarts} restarts left)")

    def _refund(self, actors: Sequence[Any]) -> None:
        """Returns the restarts of explained crashes to the budget, except for every `EXPLAINED_PER_RESTART`-th."""
        for actor in actors:
            if actor in self._unexplained:
                self._unexplained.remove(actor)
                self._explained += 1
                if self._explained % EXPLAINED_PER_RESTART and self._lowest:
                    self.restarts += 1

    def _start(self, rank: int, message: str) -> None:
        self.say(message)
        self._starting[rank] = self._threads.submit(self.group.replace, rank, self.start_timeout_s)

    def close(self) -> None:
        """Prevents further restarts. The group itself ends the actors."""
        with self._lock:
            self._closed = True
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _replace(self, rank: int, cause: str, isolating: bool = False) -> None:
        log = self.group.logs[rank]
        name, cause = f"{self.group.name}-{rank}", with_cause(cause, log)
        self._last_error = ActorFailed(self.group.name, rank, "play", cause, log=log)
        if restart := self.restarts > (self._lowest if isolating else 0):
            self.restarts -= 1
        left = max(0, self.restarts)
        then = f"Restarting it ({left} restarts left)." if restart else "No restart is left (rollout.restarts)."
        text = f"{name} crashed: {cause}. Its trajectories are retried. {then}"
        lost = Event("actor_lost", text, actor=name, rank=rank, cause=cause, restarts_left=left)
        if restart:
            self._start(rank, lost)
        else:
            self._given_up.add(rank)
            self._threads.submit(self.group.end, rank)
            self.say(lost)


def _quarantined(running: Sequence[CrashHistory]) -> bool:
    return any(trajectory.quarantined for trajectory in running)
