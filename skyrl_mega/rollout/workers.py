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
from skyrl_mega.rollout.crash_isolation import PROBES_PER_RESTART, SUSPECTED, WorkerCrash, may_run, prompt_hash
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
        self._running: dict[int, list[int]] = {}
        """Actor id → earlier crashes of each trajectory on the actor, over all sessions."""
        self._last_crash: dict[int, tuple[Any, WorkerCrash]] = {}
        """Rank → the actor of the last crash there, and the crash."""
        self._waiting_suspects: set[str] = set()
        """Names of suspects waiting for a worker."""
        self._probes = 0
        self._no_restarts = restarts == 0
        """True if no worker is ever restarted (`rollout.restarts` is 0)."""
        self._borrowed_restarts = 0
        """Restarts made beyond the budget while a crash is being isolated, at most one per worker."""
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

    def place(self, up: Mapping[int, Any], name: str, crashes: int) -> int | None:
        """Assigns a trajectory to the least loaded running worker allowed by the rules of `crash_isolation`.

        The assignment lasts until `finished`.

        Args:
            up: Result of `up`: rank → actor of the running workers.
            name: Name of the trajectory.
            crashes: `CrashHistory.suspicion`: worker crashes during earlier attempts of the trajectory.

        Returns:
            The worker's rank; None if no worker may run the trajectory now.
        """
        with self._lock:
            (self._waiting_suspects.add if crashes >= SUSPECTED else self._waiting_suspects.discard)(name)
            for i, rank in enumerate(sorted(up, key=lambda rank: len(self._running.get(id(up[rank]), ())))):
                open_crashes = self._running.get(id(up[rank]), [])
                if may_run(crashes, open_crashes, reserved=i == 0 and bool(self._waiting_suspects)):
                    self._running.setdefault(id(up[rank]), open_crashes).append(crashes)
                    self._waiting_suspects.discard(name)
                    return rank
            return None

    def cancel_wait(self, name: str) -> None:
        """Removes a trajectory from the waiting suspects."""
        with self._lock:
            self._waiting_suspects.discard(name)

    def finished(self, actor: Any, crashes: int) -> None:
        """Ends the assignment of a trajectory with `crashes` earlier crashes to a worker."""
        with self._lock:
            open_crashes = self._running[id(actor)]
            open_crashes.remove(crashes)
            if not open_crashes:
                del self._running[id(actor)]

    def crashed(self, rank: int, actor: Any, cause: str, *, received: bool = False) -> WorkerCrash | None:
        """Handles a crashed or silent worker: ends and restarts the actor, unless another actor already took the rank.

        Args:
            rank: Rank of the worker.
            actor: The actor of the crash.
            cause: Description of the crash.
            received: True if the worker had received trajectories. If all of these were suspects, the crash is a probe.

        Returns:
            The crash as the first session recorded it, since every session removes all trajectories of the worker at
            once. None for an actor lost long ago.
        """
        with self._lock:
            if (
                not self._closed
                and rank not in self._given_up | self._starting.keys()
                and self.group.actors[rank] == actor
            ):
                open_crashes = [*self._running.get(id(actor), ())]
                worker_crash = WorkerCrash(open_crashes, received and min(open_crashes, default=0) >= SUSPECTED)
                self._last_crash[rank] = actor, worker_crash
                if worker_crash.probe:
                    self._count_probe()
                self._replace(rank, cause, suspects=received and max(open_crashes, default=0) + 1 >= SUSPECTED)
            last_actor, worker_crash = self._last_crash.get(rank, (None, WorkerCrash([], False)))
            return worker_crash if last_actor is actor else None

    def attribute_crashes(self, worker_crashes: Sequence[WorkerCrash]) -> None:
        """Turns the crashes of a failed trajectory into probes. Restarts gained this way bring back workers given up
        before."""
        with self._lock:
            for worker_crash in worker_crashes:
                if not worker_crash.probe:
                    worker_crash.probe = True
                    self._count_probe()
            if self._closed or len(self._given_up) == len(self.group):
                return
            while self.restarts > 0 and self._given_up:
                rank = self._given_up.pop()
                self.restarts -= 1
                name = f"{self.group.name}-{rank}"
                self._start(rank, f"{name} is restarted after all ({self.restarts} restarts left)")

    def _count_probe(self) -> None:
        """Counts a probe. The restart already taken is refunded, except for every `PROBES_PER_RESTART`-th probe."""
        self._probes += 1
        if self._probes % PROBES_PER_RESTART and not self._no_restarts:
            if self._borrowed_restarts:
                self._borrowed_restarts -= 1
            else:
                self.restarts += 1

    def _any_suspect(self) -> bool:
        """Returns True if any suspect is running or waiting."""
        return bool(self._waiting_suspects) or any(
            crashes >= SUSPECTED for open_crashes in self._running.values() for crashes in open_crashes
        )

    def _start(self, rank: int, message: str) -> None:
        self.say(message)
        self._starting[rank] = self._threads.submit(self.group.replace, rank, self.start_timeout_s)

    def close(self) -> None:
        """Prevents further restarts. The group itself ends the actors."""
        with self._lock:
            self._closed = True
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _replace(self, rank: int, cause: str, *, suspects: bool = False) -> None:
        log = self.group.logs[rank]
        name, cause = f"{self.group.name}-{rank}", with_cause(cause, log)
        self._last_error = ActorFailed(self.group.name, rank, "play", cause, log=log)

        def lost(then: str) -> Event:
            text = f"{name} crashed: {cause}. Its trajectories are retried. {then}"
            return Event("actor_lost", text, actor=name, rank=rank, cause=cause, restarts_left=self.restarts)

        if self.restarts > 0:
            self.restarts -= 1
            self._start(rank, lost(f"Restarting it ({self.restarts} restarts left)."))
        elif not self._no_restarts and self._borrowed_restarts < len(self.group) and (suspects or self._any_suspect()):
            self._borrowed_restarts += 1
            self._start(rank, lost("Restarting it outside the restart budget while the cause is isolated."))
        else:
            self._given_up.add(rank)
            self._threads.submit(self.group.end, rank)
            self.say(lost("No restart is left (rollout.restarts)."))
