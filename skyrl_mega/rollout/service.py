"""Groups of trajectories that are played for as long as a run lasts: submitted at any time, done in any order.

Phases have a beginning and an end, and what is in one knows no weights but those it began with. Here weights change
under what is being played, and engines leave, come back and are up to date again while requests wait for them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from skyrl_mega.cluster.errors import ActorFailed
from skyrl_mega.cluster.fleet import Fleet, NobodyServes
from skyrl_mega.config.schema import RolloutConfig, SamplingConfig
from skyrl_mega.engines.base import Completion, Request
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.rollout import journal
from skyrl_mega.rollout.event_loop import ServiceLoop
from skyrl_mega.rollout.generator import closed
from skyrl_mega.rollout.journal import Journal, Said
from skyrl_mega.rollout.router import Load, Router, Waiting, load_of
from skyrl_mega.rollout.slots import AnyAgent, Desk
from skyrl_mega.rollout.trajectory import Group, Status, Trajectory

TOGETHER_S = 1.0
"""Seconds that groups which are asked for together wait for one another's environments to open: requests that leave in
one order, as in a phase, are served in one."""


@dataclass(frozen=True)
class Ticket:
    """A group that was asked for."""

    number: int
    """Its place among all groups of the run: no other has it."""
    index: int
    """Of its prompt in the data."""
    version: int
    """The engines' weights when it was asked for: none of its tokens is of older ones."""
    names: tuple[str, ...]
    """Name each sample's requests and its random stream; no others have them."""
    played: Mapping[int, Trajectory] = field(default_factory=dict)
    """Samples that need not be played: an earlier life of the run has, which ended before the group was done."""
    said: Sequence[Said] = ()
    """Turns of the others that it has played."""

    @property
    def left(self) -> list[int]:
        """Samples that are to be played."""
        return [sample for sample in range(len(self.names)) if sample not in self.played]


@dataclass(frozen=True)
class Done:
    """A group that was played to its end."""

    ticket: Ticket
    group: Group


class Players(Protocol):
    """Who plays: a `Generator`, or what stands for one where time is virtual."""

    fleet: Fleet
    rollout: RolloutConfig

    def agent(self, sampling: SamplingConfig, router: type[Router] | None = None) -> AnyAgent:
        """An agent with such a router."""


@runtime_checkable
class ServiceDesk(Desk, Protocol):
    """What a service asks of whoever sends requests to the engines: a `ServiceRouter`, or those of other processes."""

    resting: set[int]
    """Engines that have refused a request, until the next sync."""

    def rejoin(self) -> None:
        """Takes in engines that have come back, and goes on."""

    def remember(self, said: Sequence[Said]) -> None:
        """Turns of trajectories that are about to be played."""

    async def write_said(self, folder: Path) -> list[Said]:
        """Has other processes write the turns of those that they play into files of their own there
        (`journal.read_all`); returns those that are known here."""

    def forget(self, trajectory: str) -> None:
        """It has ended."""


class RolloutService:
    """Plays groups in a loop that goes on while the caller does other things.

    Args:
        players: On the engines that are asked.
        sampling: How tokens are drawn.
        loop: Of the players.
    """

    def __init__(self, players: Players, sampling: SamplingConfig, loop: ServiceLoop) -> None:
        self.players, self.sampling, self.loop = players, sampling, loop
        self.under_way: dict[int, Ticket] = {}
        """By number; the caller's thread alone looks at it."""
        self._played: dict[int, dict[int, Trajectory]] = {}
        """Of each of them the samples that have been played."""
        self._done: deque[Done | BaseException] = deque()
        self._agent: AnyAgent | None = None

    @property
    def served(self) -> bool:
        """Whether any engine can be asked, but for those that wait for a sync."""
        router = self._router
        return bool({*self.players.fleet.serving} - (router.resting if router else set()))

    @property
    def _router(self) -> ServiceDesk | None:
        """The agent's, once there is one."""
        if self._agent is None:
            return None
        assert isinstance(self._agent.router, ServiceDesk)
        return self._agent.router

    def submit(self, tickets: Sequence[Ticket], prompts: Sequence[Prompt]) -> None:
        """Asks for a group of each of these prompts. All are opened before the first is played, as in a phase, but for
        those whose opening takes long (`TOGETHER_S`): no other group waits for them.

        Raises:
            ActorFailed: No engine is left and none comes back.
        """
        if not tickets:
            return
        if not self.under_way:
            with suppress(NobodyServes):  # requests wait for an engine that comes back
                # As before a phase: cached prefixes would change the last bits.
                self.players.fleet.ask("forget", timeout=self.players.rollout.request_timeout_s)
        self.under_way |= {ticket.number: ticket for ticket in tickets}
        self._played |= {ticket.number: {**ticket.played} for ticket in tickets}
        self.loop.start(self._play(list(zip(tickets, prompts, strict=True))))

    def done(self, wait_s: float) -> list[Done]:
        """The groups that have been done since the last call. Waits so long for the first where there is none.

        Raises:
            ActorFailed: An engine refused a request, or none is left and none comes back; the root cause.
        """
        self.loop.wait(lambda: bool(self._done), wait_s)
        found = []
        while self._done:
            outcome = self._done.popleft()
            if isinstance(outcome, BaseException):
                raise outcome
            del self.under_way[outcome.ticket.number], self._played[outcome.ticket.number]
            found.append(outcome)
        return found

    def write_said(self, folder: Path) -> None:
        """Writes the turns of trajectories that are being played, wherever that is."""
        if (router := self._router) is not None:  # in this thread: the loop has trajectories to play
            journal.write(journal.file_of(folder, "driver"), self.loop.run(router.write_said(folder)))

    def so_far(self) -> list[Ticket]:
        """Those that are under way, with the samples that have been played up to now."""
        return [
            replace(ticket, played={s: t for s, t in dict(self._played[number]).items() if _lasts(t)})
            for number, ticket in self.under_way.items()
        ]

    def engines_changed(self) -> None:
        """A sync has ended: engines that are up to date take requests again, also those that were not."""
        self.loop.call(self._rejoin)

    def _tell(self, outcome: Done | BaseException) -> None:
        self._done.append(outcome)
        self.loop.changed()

    def _rejoin(self) -> None:
        if (router := self._router) is not None:
            router.rejoin()

    async def _play(self, wanted: list[tuple[Ticket, Prompt]]) -> None:
        if self._agent is None:
            self._agent = self.players.agent(self.sampling, ServiceRouter)
        agent, router = self._agent, self._router
        assert router is not None
        router.remember([one for ticket, _ in wanted for one in ticket.said])
        tasks = asyncio.create_task
        opening = [tasks(agent.open(prompt, s)) for ticket, prompt in wanted for s in ticket.left]
        playing: list[asyncio.Task[None]] = []
        try:
            if opening:
                await asyncio.wait(opening, timeout=TOGETHER_S)
            opened = iter(opening)
            for ticket, prompt in wanted:
                own = {sample: next(opened) for sample in ticket.left}
                playing.append(tasks(self._group(agent, ticket, prompt, own)))
            await asyncio.gather(*playing)
        except ActorFailed as error:
            # Raised in every task that waited: their frames would fill pages.
            self._tell(error.with_traceback(None))
        except BaseException as error:
            self._tell(error)
            raise
        finally:
            await closed(agent, opening, playing)

    async def _group(
        self, agent: AnyAgent, ticket: Ticket, prompt: Prompt, opened: Mapping[int, asyncio.Task[Any]]
    ) -> None:
        played, router = self._played[ticket.number], self._router
        assert router is not None

        async def play(sample: int) -> None:
            name = ticket.names[sample]
            played[sample] = await agent.play(await asyncio.shield(opened[sample]), name)  # `closed` ends those
            router.forget(name)

        playing = [asyncio.create_task(play(sample)) for sample in opened]
        try:
            await asyncio.gather(*playing)
        finally:  # where one fails, the others end too, before their environments are closed
            for task in playing:
                task.cancel()
            await asyncio.gather(*playing, return_exceptions=True)
        self._tell(Done(ticket, Group(prompt, [played[sample] for sample in range(len(ticket.names))])))


def _lasts(t: Trajectory) -> bool:
    """Whether a run that resumes takes it as it is: what a service under its environment has ended gets a new try."""
    return t.status is not Status.ERROR_INFRASTRUCTURE


class ServiceRouter(Router):
    """Routes requests for as long as a run lasts. Those that no engine can take wait for one that comes back."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.resting: set[int] = set()
        """Engines that have refused a request, until the next sync."""
        self.journal = Journal()

    async def generate(self, request: Request) -> Completion:
        """Continues one prompt, or says what was said to it before."""
        if (known := self.journal.answer(request)) is not None:
            return known
        completion = await super().generate(request)
        self.journal.keep(request, completion)
        return completion

    def remember(self, said: Sequence[Said]) -> None:
        """Turns of trajectories that are about to be played."""
        self.journal.add(said)

    async def write_said(self, folder: Path) -> list[Said]:
        """The turns of those that are being played."""
        return self.journal.all()

    def forget(self, trajectory: str) -> None:
        """It has ended."""
        self.journal.forget(trajectory)

    def rejoin(self) -> None:
        """Takes in engines that have come back, and goes on."""
        self.resting.clear()
        self.rejoins += 1
        for engine in self.fleet.serving:
            self.load.setdefault(engine, load_of(self.fleet.facts[engine]))
        self._schedule()

    def _takes(self, engine: int) -> bool:
        return super()._takes(engine) and engine not in self.resting

    def _postpone(self, engine: int, load: Load | None, part: dict[str, Waiting], began: int) -> bool:
        """Half of an update has come: the sync that brings the rest calls `rejoin`, or has since the request left."""
        if began == self.rejoins:
            self.resting.add(engine)
        self._again(load, part)
        return True

    def _nobody(self, part: dict[str, Waiting], error: ActorFailed) -> None:
        """No engine is left: all wait, unless none comes back."""
        if isinstance(error, NobodyServes):
            self.queue.extendleft(reversed(part.values()))
        else:
            super()._nobody(part, error)
