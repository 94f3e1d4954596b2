"""Retries of trajectories after the failure of a service under the environment."""

from __future__ import annotations

import asyncio

from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.rollout.agent_loop import Agent, Opened
from skyrl_mega.trajectories.trajectory import Status, Trajectory

LONGEST_S = 60.0
PAUSE_S = 1.0
"""Seconds before the first retry. The pause doubles with each further retry up to `LONGEST_S`, as the service may be
recovering."""


class RetryingAgent(Agent):
    """An agent that retries a trajectory after an infrastructure fault, but not after a fault of the environment or the
    policy.

    The retry is the same trajectory: the requests keep the same names, and therefore the same random streams.
    """

    retries = 0
    """Most retries of a trajectory (`environment.retries`)."""

    async def open(self, prompt: Prompt, sample: int) -> Opened:
        """Opens a trajectory as `Agent.open` does; retries if an infrastructure fault prevented opening the
        environment."""
        return await self._reopened(await super().open(prompt, sample))

    async def play(self, opened: Opened, name: str) -> Trajectory:
        """Runs a trajectory as `Agent.play` does; retries from the prompt after an infrastructure fault."""
        trajectory = await super().play(opened, name)
        while self._may_retry(opened):
            opened = await self._reopened(opened)
            trajectory = await super().play(opened, name)
        return trajectory

    async def _reopened(self, opened: Opened) -> Opened:
        """Returns the opened trajectory, or a newly opened retry if opening failed and retries are left."""
        while self._may_retry(opened):
            failed = opened.trajectory
            await asyncio.sleep(min(LONGEST_S, PAUSE_S * 2**failed.retries))
            opened = await super().open(failed.prompt, failed.sample)
            opened.trajectory.retries = failed.retries + 1
        return opened

    def _may_retry(self, opened: Opened) -> bool:
        t = opened.trajectory
        return t.status is Status.ERROR_INFRASTRUCTURE and t.retries < self.retries
