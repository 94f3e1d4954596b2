"""The samples that are missing, drawn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from skyrl_mega.cluster.fleet import NobodyServes
from skyrl_mega.evaluate.results import Results, row_of
from skyrl_mega.evaluate.sets import Draw
from skyrl_mega.rollout.event_loop import EventLoop
from skyrl_mega.rollout.slots import AgentLike
from skyrl_mega.rollout.trajectory import Trajectory
from skyrl_mega.trainer.health.failures import failures


class Source(Protocol):
    """Where a policy's words come from: `engines.EngineSource`, `endpoint.EndpointSource`."""

    @property
    def at_once(self) -> int:
        """Trajectories under way at once."""

    def agent(self) -> AbstractAsyncContextManager[AgentLike]:
        """An agent. All agents of a source are used in the same event loop."""

    def refill(self) -> None:
        """Waits until somebody serves again, after NobodyServes."""


def draw_missing(
    source: Source,
    draws: list[Draw],
    results: Results,
    metrics: Callable[[str], tuple[str, ...]],
    progress: Callable[[int], None],
    say: Callable[[str], None],
) -> None:
    """Draws samples and keeps each as it ends. Where all engines have died, goes on with the rest when one is back.

    Args:
        source: Who is asked.
        draws: What is asked.
        results: Takes them.
        metrics: Those that an environment declares, by its name.
        progress: Called with the number of samples done.
        say: Told of the first sample whose environment failed; none has a score.

    Raises:
        ActorFailed, EndpointFailed: No response; the root cause. What has ended is kept.
        UserError: The endpoint refused.
    """
    done = failed = 0

    def ended(draw: Draw, trajectory: Trajectory) -> None:
        nonlocal done, failed
        if trajectory.status.failed:
            failed += 1
            if failed == 1:
                say(failures([trajectory]) or "")
        results.add(draw.set, row_of(trajectory, metrics(draw.prompt.env_class)))
        done += 1
        progress(done)

    left = draws
    with EventLoop() as loop:
        while left:
            try:
                loop.run(_play(source, left, ended))
            except NobodyServes:
                source.refill()
            left = results.missing(iter(left))


async def _play(source: Source, draws: Iterable[Draw], ended: Callable[[Draw, Trajectory], None]) -> None:
    """So many trajectories at once, each opened when it begins: environments hold files, processes, memory."""
    left = iter(draws)
    async with source.agent() as agent:

        async def worker() -> None:
            for draw in left:
                opened = await agent.open(draw.prompt, draw.sample)
                ended(draw, await agent.play(opened, draw.name))

        tasks = [asyncio.create_task(worker()) for _ in range(source.at_once)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
