"""The driver's connection to a rollout worker: the trajectories that run there, and what is not sent yet."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from skyrl_mega.rollout.workers.messages import TrajectoryJob
from skyrl_mega.trajectories.trajectory import Trajectory


class WorkerLost(Exception):
    """The crash of a worker; its trajectories must be sent to another worker.

    Args:
        cause: Description of the crash.
        received: True if the worker had received the trajectory.
    """

    def __init__(self, cause: str, *, received: bool) -> None:
        super().__init__(cause)
        self.received = received
        """True if the worker had received the trajectory."""


Answer = asyncio.Future[Trajectory | None]
"""The finished trajectory; None for an abandoned trajectory."""


@dataclass(eq=False)
class WorkerLink:
    """The driver's connection to an incarnation of a worker; a restarted worker gets a new connection."""

    rank: int
    actor: Any
    waiting: dict[int, Answer] = field(default_factory=dict)
    """Trajectories in progress, by job key."""
    jobs: list[TrajectoryJob] = field(default_factory=list)
    """Jobs not sent yet."""
    abandoned: list[int] = field(default_factory=list)
    """Keys of abandoned jobs not reported to the worker yet."""
    left: set[int] = field(default_factory=set)
    """Ranks of engines reported to the worker as leaving."""
    ready: bool = False
    """True once the worker knows the session. Nothing else is sent before, because calls may overtake each other."""
    listening: asyncio.Task[None] | None = None

    def fail(self, error: BaseException) -> None:
        """Raises the error in all tasks waiting for trajectories on this worker, and forgets these trajectories. `jobs`
        and `abandoned` stay unchanged."""
        for answer in self.waiting.values():
            _raise(answer, error)
        self.waiting.clear()

    def received(self) -> set[int]:
        """Returns the keys of the jobs in progress already sent to the worker; empty until the worker knows the
        session."""
        return self.waiting.keys() - {key for job in self.jobs for key in job.keys} if self.ready else set()

    def report_crash(self, cause: str) -> None:
        """Raises the worker's crash (`WorkerLost`) in all tasks waiting for trajectories on this worker; the tasks
        choose another worker. `jobs` and `abandoned` stay unchanged. `cause` describes the crash."""
        received = self.received()
        for key, answer in self.waiting.items():
            _raise(answer, WorkerLost(cause, received=key in received))
        self.waiting.clear()

    def answer(self, key: int, trajectory: Trajectory | None) -> None:
        """Hands a finished trajectory, or None for an abandoned trajectory, to the task waiting for the job `key`. Does
        nothing if no task waits."""
        answer = self.waiting.pop(key, None)
        if answer is not None and not answer.done():
            answer.set_result(trajectory)

    def drop_abandoned(self) -> None:
        """Drops abandoned jobs that were not sent yet, and answers None to the tasks waiting for their trajectories.
        `abandoned` keeps the keys of the other jobs, which the worker must drop."""
        unsent, abandoned = {job.key for job in self.jobs}, {*self.abandoned}
        for job in self.jobs:
            for key in job.keys if job.key in abandoned else ():
                self.answer(key, None)
        self.jobs = [job for job in self.jobs if job.key not in abandoned]
        self.abandoned = sorted(abandoned - unsent)

    def report_left(self, session: str, engines: Collection[int]) -> None:
        """Tells the worker, without waiting, that engines are leaving and get no new requests. Sends only engines not
        reported before; nothing if there are none.

        Args:
            session: Name of the session at the worker.
            engines: Ranks of all engines that have left or are leaving.
        """
        if new := {*engines} - self.left:
            self.left |= new
            self.actor.engines_left.remote(session, sorted(new))


def _raise(answer: Answer, error: BaseException) -> None:
    """Raises the error in the task waiting for the answer, if any."""
    if not answer.done():
        answer.set_exception(error)
        answer.exception()  # marks the error as retrieved, as the task may have been cancelled
