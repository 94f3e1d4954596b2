"""Sampling of the missing trajectories."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from skyrl_mega.cluster.fleet import NoServingActor
from skyrl_mega.evaluate.results import Results, row_of
from skyrl_mega.evaluate.sets import SampleTask
from skyrl_mega.rollout.event_loop import EventLoop
from skyrl_mega.rollout.player import Player
from skyrl_mega.trainer.health.failures import failures
from skyrl_mega.trajectories.trajectory import Trajectory


class AnswerSource(Protocol):
    """Source of the policy's answers: `engines.EngineSource` or `endpoint.EndpointSource`."""

    @property
    def at_once(self) -> int:
        """Maximum number of concurrent trajectories."""

    def player(self) -> AbstractAsyncContextManager[Player]:
        """Returns a context manager that opens a player and closes it. All players of a source must be used in the same
        event loop."""

    def refill(self) -> None:
        """Waits until an engine serves again, after NoServingActor. Raises ActorFailed if none can be restarted."""


def sample_missing(
    source: AnswerSource,
    tasks: list[SampleTask],
    results: Results,
    metrics: Callable[[str], tuple[str, ...]],
    progress: Callable[[int], None],
    say: Callable[[str], None],
) -> None:
    """Samples all `tasks` concurrently and saves each sample as soon as finished. Finished samples are kept whatever
    this raises.

    If all engines failed, waits for a restarted engine and continues with the missing samples.

    Args:
        source: Source of players, which generate the trajectories.
        tasks: The samples to generate, such as `results.missing`: saved samples are generated again.
        results: Stores the samples.
        metrics: Returns the metrics declared by an environment, by the environment's name.
        progress: Called after each sample, failed samples included, with the number finished by this call, from 1.
        say: Prints a line about the first sample with a failed environment; failed samples are saved without a score.

    Raises:
        ActorFailed: No engine can be restarted; gives the root cause.
        EndpointFailed: The endpoint does not respond.
        UserError: The endpoint refused a request.
        ClusterError: Remote arrays of a sample are lost.
        TypeError, ValueError: An environment reports a metric that is no number.
        OSError: A sample cannot be written.
    """
    finished = failed = 0

    def ended(task: SampleTask, trajectory: Trajectory) -> None:
        nonlocal finished, failed
        if trajectory.status.failed:
            failed += 1
            if failed == 1:
                say(failures([trajectory]) or "")
        results.add(task.set, row_of(trajectory, metrics(task.prompt.env_class)))
        finished += 1
        progress(finished)

    pending = tasks
    with EventLoop() as loop:
        while pending:
            try:
                loop.run(_play(source, pending, ended))
            except NoServingActor:
                source.refill()
            pending = results.missing(iter(pending))


async def _play(
    source: AnswerSource, tasks: Iterable[SampleTask], ended: Callable[[SampleTask, Trajectory], None]
) -> None:
    """Runs up to `source.at_once` trajectories concurrently. Each environment opens only at the start of its
    trajectory, because environments hold files, processes and memory."""
    pending = iter(tasks)
    async with source.player() as player:

        async def worker() -> None:
            for task in pending:
                ended(task, await player.play(task.prompt, task.sample, task.name))

        workers = [asyncio.create_task(worker()) for _ in range(source.at_once)]
        try:
            await asyncio.gather(*workers)
        finally:
            for running in workers:
                running.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
