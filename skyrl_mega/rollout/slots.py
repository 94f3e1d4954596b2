"""A bound on environments that are open at once: a trajectory waits for a slot, and its environment is opened then."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.rollout.agent_loop import Agent
from skyrl_mega.rollout.trajectory import Trajectory


class Desk(Protocol):
    """What a phase and a service ask of whoever sends requests to the engines for them."""

    def expect(self, players: int) -> None:
        """So many trajectories are about to ask."""

    def leave(self) -> None:
        """One of them has ended."""

    def close(self) -> None:
        """Nobody waits for what is under way any more."""


class AnyAgent(Protocol):
    """An `Agent`, or what plays trajectories as one does."""

    @property
    def router(self) -> Desk:
        """Of its requests."""

    async def open(self, prompt: Prompt, sample: int) -> Any:
        """A trajectory before its first turn."""

    async def play(self, opened: Any, name: str) -> Trajectory:
        """Plays to the end."""

    async def close(self, opened: Any) -> None:
        """For what is never played."""


class Player(Protocol):
    """Plays whole trajectories, here or in another process."""

    @property
    def router(self) -> Desk:
        """Of its requests."""

    async def play(self, prompt: Prompt, sample: int, name: str) -> Trajectory:
        """Opens a trajectory, plays it to its end and closes it."""


class PlayerHere:
    """Plays them with an agent in this process."""

    def __init__(self, agent: Agent) -> None:
        self.agent, self.router = agent, agent.router

    async def play(self, prompt: Prompt, sample: int, name: str) -> Trajectory:
        """Opens a trajectory, plays it to its end and closes it."""
        return await self.agent.play(await self.agent.open(prompt, sample), name)


@dataclass
class SlotUse:
    """How many slots were taken at once, of whoever counts into this."""

    now: int = 0
    most: int = 0

    def change(self, by: int) -> None:
        """So many more are taken."""
        self.now += by
        self.most = max(self.most, self.now)

    def read(self) -> int:
        """The most since the last call."""
        most, self.most = self.most, self.now
        return most


class Slots:
    """So many environments are open at once. Lives in one event loop.

    Of several who play, as rollouts and an evaluation beside them, whoever has the fewest slots is next, and with each
    of them the one that has waited longest.

    Args:
        most: Slots; None has no bound, and nobody waits.
    """

    def __init__(self, most: int | None) -> None:
        self.most = most
        self.taken: Counter[object] = Counter()
        """By who plays."""
        self.queues: dict[object, deque[asyncio.Future[None]]] = {}
        self.use = SlotUse()

    @asynccontextmanager
    async def one(self, who: object) -> AsyncIterator[None]:
        """A slot for somebody, once there is one."""
        if self.most is not None and self.taken.total() >= self.most:
            await self._wait(who)  # the slot is ours when this returns
        else:
            self._take(who)
        try:
            yield
        finally:
            self._give_back(who)

    async def _wait(self, who: object) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue = self.queues.setdefault(who, deque())
        queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it was ours already
                self._give_back(who)
            raise

    def _take(self, who: object) -> None:
        self.taken[who] += 1
        self.use.change(1)

    def _give_back(self, who: object) -> None:
        self.taken[who] -= 1
        self.use.change(-1)
        if not self.taken[who]:
            del self.taken[who]
        while self.queues:
            following = min(self.queues, key=lambda one: self.taken[one])
            turn = self.queues[following].popleft()
            if not self.queues[following]:
                del self.queues[following]
            if not turn.done():  # its trajectory was cancelled meanwhile
                self._take(following)
                turn.set_result(None)
                return


@dataclass(frozen=True)
class Asked:
    """A trajectory that is not open yet."""

    prompt: Prompt
    sample: int


class SlotAgent:
    """Plays trajectories as an `Agent` does, but opens none before it has a slot.

    Args:
        player: Who plays.
        slots: How many may be open at once.
    """

    def __init__(self, player: Player, slots: Slots) -> None:
        self.player, self.slots, self.router = player, slots, player.router

    async def open(self, prompt: Prompt, sample: int) -> Asked:
        """Costs nothing."""
        return Asked(prompt, sample)

    async def play(self, opened: Asked, name: str) -> Trajectory:
        """Waits for a slot, and opens, plays and closes the trajectory.

        Args:
            opened: From `open`.
            name: Names its requests and their random stream; no other has it.
        """
        now = asyncio.get_running_loop().time
        start = now()
        async with self.slots.one(self):
            waited = now() - start
            t = await self.player.play(opened.prompt, opened.sample, name)
        t.seconds["slot"] = waited
        return t

    async def close(self, opened: Asked) -> None:
        """It is not open."""
