"""A bound on open environments: a trajectory waits for a slot before the environment is opened."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.rollout.gate import Start
from skyrl_mega.rollout.player import Player
from skyrl_mega.trajectories.trajectory import Trajectory


@dataclass
class SlotUse:
    """The number of slots in use at once, over all `Slots` sharing this counter."""

    now: int = 0
    """Slots in use at present."""
    most: int = 0
    """Highest number of slots in use since the last `read`."""

    def change(self, by: int) -> None:
        """Adds `by`, possibly negative, to the number of slots in use."""
        self.now += by
        self.most = max(self.most, self.now)

    def read(self) -> int:
        """Returns the highest number of slots in use since the last call, and starts counting again from the slots in
        use now."""
        most, self.most = self.most, self.now
        return most


class Slots:
    """A limit on environments open at once. Lives in a single event loop.

    If several users share the slots, such as rollouts and a concurrent evaluation, the user with the fewest slots is
    served next, in the order of arrival within each user.

    Args:
        most: Number of slots; None sets no limit, so waiting never happens.
    """

    def __init__(self, most: int | None) -> None:
        self.most = most
        self.taken: Counter[object] = Counter()
        """Slots in use by each user."""
        self.queues: dict[object, deque[asyncio.Future[None]]] = {}
        self.use = SlotUse()

    @asynccontextmanager
    async def hold(self, who: object) -> AsyncIterator[None]:
        """Waits, without limit, until a slot is free, and holds the slot inside the `async with` block.

        Args:
            who: The user of the slot, such as a player.
        """
        if self.most is not None and self.taken.total() >= self.most:
            await self._wait(who)  # `_give_back` took the slot for us
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
            if turn.done() and not turn.cancelled():  # the slot was already ours
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
            user = min(self.queues, key=lambda waiting: self.taken[waiting])
            turn = self.queues[user].popleft()
            if not self.queues[user]:
                del self.queues[user]
            if not turn.done():  # a waiter may have been cancelled
                self._take(user)
                turn.set_result(None)
                return


class SlotPlayer:
    """A player that opens the environment of a trajectory only once a slot is free. Trajectories begin at once, because
    others may wait for a slot to open their environments.

    Args:
        player: Runs the trajectories.
        slots: The limit on open environments.
    """

    def __init__(self, player: Player, slots: Slots) -> None:
        self.player, self.slots, self.router = player, slots, player.router

    async def play(self, prompt: Prompt, sample: int, name: str, start: Start | None = None) -> Trajectory:
        """Waits, without limit, for a slot, runs the trajectory and returns the trajectory, with the wait in seconds in
        `seconds["slot"]`. Ignores `start`. Arguments as in `Player.play`.

        Raises:
            ActorFailed: An engine refused a request, or no engine is left (NoServingActor, in a phase), or no rollout
                worker is left.
            WrongRoutes: The engine's routes do not match the tokens.
            UserError: The chat template leaves out the assistant's words.
        """
        now = asyncio.get_running_loop().time
        begun = now()
        async with self.slots.hold(self):
            waited = now() - begun
            t = await self.player.play(prompt, sample, name)
        t.seconds["slot"] = waited
        return t
