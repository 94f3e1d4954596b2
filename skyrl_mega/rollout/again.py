"""Trajectories that are played again, from their prompts, where a service under their environment failed."""

from __future__ import annotations

import asyncio

from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.rollout.agent_loop import Agent, Opened
from skyrl_mega.rollout.trajectory import Status, Trajectory

LONGEST_S = 60.0
PAUSE_S = 1.0
"""Before a trajectory is opened again, twice as long before each further time, `LONGEST_S` at most: what failed may be
on its way back."""


class PersistentAgent(Agent):
    """An agent that plays a trajectory again when the infrastructure failed, and not its environment or its policy.

    It is the same trajectory: its requests have the same names, and so the same random streams.
    """

    retries = 0
    """How often one trajectory is played again (`environment.retries`)."""

    async def open(self, prompt: Prompt, sample: int) -> Opened:
        """As `Agent.open`, again where the environment could not be opened for a fault of the infrastructure."""
        return await self._opened(await super().open(prompt, sample))

    async def play(self, opened: Opened, name: str) -> Trajectory:
        """As `Agent.play`, again from the prompt where a fault of the infrastructure ended it."""
        played = await super().play(opened, name)
        while self._again(opened):
            opened = await self._opened(opened)
            played = await super().play(opened, name)
        return played

    async def _opened(self, opened: Opened) -> Opened:
        """This one, or one in its place where it has failed and may be opened again."""
        while self._again(opened):
            failed = opened.trajectory
            await asyncio.sleep(min(LONGEST_S, PAUSE_S * 2**failed.again))
            opened = await super().open(failed.prompt, failed.sample)
            opened.trajectory.again = failed.again + 1
        return opened

    def _again(self, opened: Opened) -> bool:
        t = opened.trajectory
        return t.status is Status.ERROR_INFRASTRUCTURE and t.again < self.retries
