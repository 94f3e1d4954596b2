"""A group in progress: the parts shared by a group's branches."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.rollout.agent.agent_loop import Agent
from skyrl_mega.rollout.agent.environment import Environment, EnvironmentFault
from skyrl_mega.rollout.agent.limits import TrajectoryLimits
from skyrl_mega.rollout.event_loop import cancel_all
from skyrl_mega.rollout.gate import Start

Result = TypeVar("Result")
MOST_REQUESTS = 10_000
"""Most requests of a group to the engines: a generator that asks for more probably never ends."""


class GeneratorFault(Exception):
    """The code of a generator broke the contract. The message says which call, what came and what is allowed."""


@dataclass(frozen=True)
class GroupRequest:
    """A prompt whose trajectories a generator makes."""

    prompt: Prompt
    """The prompt: messages, name of the environment, columns of the data row."""
    names: tuple[str, ...]
    """Unique name of each trajectory; the source of the requests' names and random streams."""

    @property
    def samples(self) -> int:
        """Number of trajectories to return (`data.samples_per_prompt`)."""
        return len(self.names)


class GroupState:
    """A group in progress, until `close`. Lives in the event loop of the rollouts.

    Args:
        agent: Runs turns and environments.
        group: The prompt and the names of the trajectories.
        start: Awaited before the first request (`Gate`).
    """

    def __init__(self, agent: Agent, group: GroupRequest, start: Start | None = None) -> None:
        self.agent, self.group = agent, group
        self.until: float | None = None
        """`time.perf_counter()` at the end of the group's time limit (`rollout.trajectory_timeout_s`, counted from the
        first request); None before the first request, or without a limit."""
        self.opened: list[Environment] = []
        """All environments of the group."""
        self.sampled = 0
        """Number of tokens sampled for the group."""
        self.fault: Exception | None = None
        """The first fault of the run, such as a missing engine."""
        self._start = start
        self._starting: asyncio.Task[None] | None = None
        self._requests = 0
        self._tasks: Counter[asyncio.Task[Any]] = Counter()
        self._closed = False

    @property
    def limits(self) -> TrajectoryLimits:
        """The limits of a trajectory; `sample` and `step` keep them."""
        return self.agent.limits

    async def started(self) -> None:
        """Waits before the first request until the groups of the phase begin, and starts the group's time limit."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._begin())
        await asyncio.shield(self._starting)

    async def _begin(self) -> None:
        if self._start is not None:
            await self._start()
        self.until = self.limits.deadline()

    def count(self, tokens: int) -> int:
        """Counts a request and its sampled tokens, and returns the number of the request, from 1.

        Raises:
            GeneratorFault: The group has made more than `MOST_REQUESTS` requests.
        """
        self.sampled += tokens
        self._requests += 1
        if self._requests > MOST_REQUESTS:
            raise GeneratorFault(f"generate asked the engines for more than {MOST_REQUESTS:,} answers to a prompt")
        return self._requests

    @contextmanager
    def working(self) -> Iterator[None]:
        """Lets `close` cancel the present task while the `with` block runs.

        Raises:
            GeneratorFault: The group has ended.
        """
        if self._closed:
            raise GeneratorFault("generate returned while tasks of the group were at work; await all of them")
        task = asyncio.current_task()
        assert task is not None
        self._tasks[task] += 1
        try:
            yield
        finally:
            self._tasks[task] -= 1
            if not self._tasks[task]:
                del self._tasks[task]

    async def of_run(self, work: Awaitable[Result]) -> Result:
        """Awaits `work` and returns its result; its exception is raised again. An exception that is no environment's
        fault is also kept in `fault`, because code of a generator may catch it."""
        try:
            return await work
        except EnvironmentFault:
            raise
        except Exception as error:
            self.fault = self.fault or error
            raise

    async def close(self) -> None:
        """Ends the group: cancels tasks still at work and closes all environments. Later work of the group raises
        GeneratorFault (`working`)."""
        self._closed = True
        starting = [] if self._starting is None else [self._starting]
        await cancel_all([*(task for task in self._tasks if task is not asyncio.current_task()), *starting])
        for env in self.opened:
            await env.close()
