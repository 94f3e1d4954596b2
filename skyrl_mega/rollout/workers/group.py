"""The driver's view of the rollout workers: placement of trajectories, crashes and restarts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from skyrl_mega.cluster.group import ActorGroup
from skyrl_mega.cluster.supervised_group import State, SupervisedGroup
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.rollout.workers.crash_isolation import EXPLAINED_PER_RESTART, CrashHistory, prompt_hash


class Workers(SupervisedGroup):
    """A supervised group of `worker.RolloutWorker` actors, the trajectories on each, and the crashes of trajectories.

    Phases and services share the workers, and may detect the same crash in two event loops.

    Args:
        group: The actors.
        restarts: Restart budget of all workers together.
        start_timeout_s: Seconds until a restarted worker is up.
        say: Prints a message for the user.
    """

    lost_note = "Its trajectories are retried. "

    def __init__(
        self, group: ActorGroup, *, restarts: int, start_timeout_s: float, say: Callable[[str], None] = print
    ) -> None:
        super().__init__(group, restarts=restarts, start_timeout_s=start_timeout_s, say=say)
        self.crashing_prompts: dict[int, set[int]] = {}
        """uid → content hashes of the prompts whose trajectories crashed workers. The `uid` is a row number of one data
        set."""
        self._running: dict[int, list[CrashHistory]] = {}
        """Actor id → trajectories on the actor, over all sessions; all quarantined, or none."""
        self._waiting: set[CrashHistory] = set()
        """Quarantined trajectories that wait for a worker."""
        self._unexplained: list[Any] = []
        """Crashed actors whose crash is not known to be caused by a single trajectory."""
        self._explained = 0
        """Number of explained crashes."""
        self._never = restarts == 0
        """True if no worker is ever restarted."""

    def is_crashing(self, prompt: Prompt) -> bool:
        """Returns True if a trajectory of this prompt failed because it kept crashing workers."""
        # cheap test first: every waiting trajectory polls this
        return prompt.uid in self.crashing_prompts and prompt_hash(prompt) in self.crashing_prompts[prompt.uid]

    def place(self, up: Mapping[int, Any], trajectory: CrashHistory) -> int | None:
        """Assigns a trajectory to the least loaded running worker that may run it: after crashes a trajectory runs
        apart from others, to find the cause (`crash_isolation`). Does not wait.

        The assignment lasts until `finished`.

        Args:
            up: Result of `running`: rank → actor.
            trajectory: The trajectory's crash history, also its identity.

        Returns:
            The worker's rank; None if no worker may run the trajectory now.
        """
        with self._lock:
            (self._waiting.add if trajectory.quarantined else self._waiting.discard)(trajectory)
            for i, rank in enumerate(sorted(up, key=lambda rank: len(self._running.get(id(up[rank]), ())))):
                running = self._running.get(id(up[rank]), [])
                if trajectory.quarantined:
                    together = min(each.together for each in (*running, trajectory))
                    allowed = len(running) < together and (not running or _quarantined(running))
                else:
                    reserved = i == 0 and bool(self._waiting)
                    allowed = not reserved and not _quarantined(running)
                if allowed:
                    self._running[id(up[rank])] = [*running, trajectory]
                    self._waiting.discard(trajectory)
                    return rank
            return None

    def cancel_wait(self, trajectory: CrashHistory) -> None:
        """Removes a trajectory, if present, from the quarantined trajectories waiting for a worker."""
        with self._lock:
            self._waiting.discard(trajectory)

    def finished(self, actor: Any, trajectory: CrashHistory) -> None:
        """Ends the assignment of a trajectory to a worker by `place`, with any outcome.

        Args:
            actor: The worker's actor.
            trajectory: The trajectory's crash history, as passed to `place`.
        """
        with self._lock:
            running = self._running[id(actor)]
            running.remove(trajectory)
            if not running:
                del self._running[id(actor)]

    def crashed(self, rank: int, actor: Any, cause: str, *, received: bool = False) -> None:
        """Handles a crashed or silent worker: ends the actor and restarts it in the background within the restart
        budget, unless another session already did. Beyond the budget the worker is given up, without an error here:
        `running` raises ActorFailed once all workers are.

        Args:
            rank: Rank of the worker.
            actor: The actor of the crash.
            cause: Description of the crash.
            received: True if the worker had received trajectories.
        """
        with self._lock:
            if self.states[rank] is not State.UP or self.group.actors[rank] != actor:
                return
            self._unexplained.append(actor)
            if received and _quarantined(self._running.get(id(actor), ())):
                self._refund([actor])
            self.retire(rank, cause)

    def _lowest(self, rank: int) -> int:
        """While a crash is being isolated, allows as many restarts beyond the budget as there are workers."""
        isolating = self._waiting or any(map(_quarantined, self._running.values()))
        crashed_before = any(trajectory.workers for trajectory in self._running.get(id(self.group.actors[rank]), ()))
        return -len(self.group) if (isolating or crashed_before) and not self._never else 0

    def explain(self, trajectory: CrashHistory) -> None:
        """Returns to the restart budget the restarts spent on the crashes of a trajectory that is found to be their
        cause, except for every `EXPLAINED_PER_RESTART`-th crash. Then restarts given-up workers as far as the budget
        allows, unless all workers are given up or the group is closed."""
        with self._lock:
            self._refund(trajectory.workers)
            given_up = self.ranks(State.GIVEN_UP)
            if self._closed or len(given_up) == len(self.group):
                return
            for rank in given_up[: max(0, self.restarts)]:
                self.restarts -= 1
                self.states[rank] = State.STARTING
                self.say(f"{self.group.name}-{rank} is restarted after all ({self.restarts} restarts left)")
                self._restart(rank)

    def _refund(self, actors: Sequence[Any]) -> None:
        """Returns the restarts of explained crashes to the budget, except for every `EXPLAINED_PER_RESTART`-th."""
        for actor in actors:
            if actor in self._unexplained:
                self._unexplained.remove(actor)
                self._explained += 1
                if self._explained % EXPLAINED_PER_RESTART and not self._never:
                    self.restarts += 1


def _quarantined(running: Sequence[CrashHistory]) -> bool:
    return any(trajectory.quarantined for trajectory in running)
