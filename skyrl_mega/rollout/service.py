"""Asynchronous rollouts: groups of trajectories submitted at any time, and finished in any order, while training goes
on.

A phase begins and ends, and uses a single version of the weights. In a service, weights change during a trajectory, and
engines fail, restart and catch up while requests wait.
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
from skyrl_mega.cluster.fleet import Fleet, NoServingActor
from skyrl_mega.config.schema import RolloutConfig, SamplingConfig
from skyrl_mega.engines.base import Completion, Request
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.rollout import journal
from skyrl_mega.rollout.event_loop import ServiceLoop
from skyrl_mega.rollout.generator import close_all
from skyrl_mega.rollout.journal import Journal, RecordedTurn
from skyrl_mega.rollout.router import Load, QueuedRequest, Router, load_of
from skyrl_mega.rollout.slots import AgentLike, RequestRouter
from skyrl_mega.trajectories.trajectory import Group, Status, Trajectory

TOGETHER_S = 1.0
"""Seconds for which groups submitted together wait until all environments are open. As in a phase, requests sent in a
fixed order are then served in a fixed order."""


@dataclass(frozen=True)
class Ticket:
    """A requested group."""

    number: int
    """Unique number of the group within the run."""
    index: int
    """Index of the prompt in the data."""
    version: int
    """Weight version of the engines at submission; no token of the group uses older weights."""
    names: tuple[str, ...]
    """Unique name of each sample; the source of the requests' names and random stream."""
    played: Mapping[int, Trajectory] = field(default_factory=dict)
    """Samples finished by an earlier life of the run and kept; not generated again."""
    recorded: Sequence[RecordedTurn] = ()
    """Recorded turns of the other samples."""

    @property
    def left(self) -> list[int]:
        """Samples left to generate."""
        return [sample for sample in range(len(self.names)) if sample not in self.played]


@dataclass(frozen=True)
class Done:
    """A finished group."""

    ticket: Ticket
    group: Group


class AgentSource(Protocol):
    """A `Generator`, or the counterpart in virtual time."""

    fleet: Fleet
    rollout: RolloutConfig

    def agent(self, sampling: SamplingConfig, router: type[Router] | None = None) -> AgentLike:
        """Returns an agent with a router of this class."""


@runtime_checkable
class ServiceRequestRouter(RequestRouter, Protocol):
    """The part of a request router used by a service: a `ServiceRouter`, or the client of the rollout workers."""

    awaiting_sync: set[int]
    """Ranks of engines that refused a request; cleared by the next weight sync."""

    def rejoin(self) -> None:
        """Updates the engines after a weight sync and continues sending requests."""

    def remember(self, recorded: Sequence[RecordedTurn]) -> None:
        """Stores recorded turns of trajectories about to run."""

    async def write_turns(self, folder: Path) -> list[RecordedTurn]:
        """Has other processes write recorded turns to files in the folder (`journal.read_all`). Returns the turns known
        in this process."""

    def forget(self, trajectory: str) -> None:
        """Drops the recorded turns of a finished trajectory."""


class RolloutService:
    """A service that generates groups in a background loop while the caller does other work.

    Args:
        source: Provides agents on the engines.
        sampling: Sampling parameters.
        loop: The event loop of `source`.
    """

    def __init__(self, source: AgentSource, sampling: SamplingConfig, loop: ServiceLoop) -> None:
        self.source, self.sampling, self.loop = source, sampling, loop
        self.under_way: dict[int, Ticket] = {}
        """Number → ticket of each unfinished group; used only by the caller's thread."""
        self._played: dict[int, dict[int, Trajectory]] = {}
        """Number → finished samples of each unfinished group."""
        self._done: deque[Done | BaseException] = deque()
        self._agent: AgentLike | None = None

    @property
    def served(self) -> bool:
        """True if any engine accepts requests, not counting engines waiting for a weight sync."""
        router = self._router
        return bool({*self.source.fleet.serving} - (router.awaiting_sync if router else set()))

    @property
    def _router(self) -> ServiceRequestRouter | None:
        """The agent's router; None before the first submission."""
        if self._agent is None:
            return None
        assert isinstance(self._agent.router, ServiceRequestRouter)
        return self._agent.router

    def submit(self, tickets: Sequence[Ticket], prompts: Sequence[Prompt]) -> None:
        """Starts a group for each prompt. As in a phase, all environments are opened before the first trajectory runs,
        but slow environments delay the other groups by at most `TOGETHER_S`.

        Raises:
            ActorFailed: No engine is left and none restarts.
        """
        if not tickets:
            return
        if not self.under_way:
            with suppress(NoServingActor):  # requests wait for an engine to restart
                # As before a phase: cached prefixes would change the last bits.
                self.source.fleet.ask("forget", timeout=self.source.rollout.request_timeout_s)
        self.under_way |= {ticket.number: ticket for ticket in tickets}
        self._played |= {ticket.number: {**ticket.played} for ticket in tickets}
        self.loop.start(self._play(list(zip(tickets, prompts, strict=True))))

    def done(self, wait_s: float) -> list[Done]:
        """Returns the groups finished since the last call. If there is none, waits up to `wait_s` seconds for the
        first.

        Raises:
            ActorFailed: An engine refused a request, or no engine is left and none restarts; with the root cause.
        """
        self.loop.wait(lambda: bool(self._done), wait_s)
        new_groups = []
        while self._done:
            outcome = self._done.popleft()
            if isinstance(outcome, BaseException):
                raise outcome
            del self.under_way[outcome.ticket.number], self._played[outcome.ticket.number]
            new_groups.append(outcome)
        return new_groups

    def write_turns(self, folder: Path) -> None:
        """Writes the recorded turns of unfinished trajectories, in this process and in rollout workers."""
        if (router := self._router) is not None:  # in this thread: the loop is busy with trajectories
            journal.write(journal.file_of(folder, "driver"), self.loop.run(router.write_turns(folder)))

    def so_far(self) -> list[Ticket]:
        """Returns the tickets of unfinished groups, with the samples finished so far."""
        return [
            replace(ticket, played={s: t for s, t in dict(self._played[number]).items() if _is_kept(t)})
            for number, ticket in self.under_way.items()
        ]

    def engines_changed(self) -> None:
        """Lets the engines updated by a weight sync accept requests again."""
        self.loop.call(self._rejoin)

    def _tell(self, outcome: Done | BaseException) -> None:
        self._done.append(outcome)
        self.loop.changed()

    def _rejoin(self) -> None:
        if (router := self._router) is not None:
            router.rejoin()

    async def _play(self, wanted: list[tuple[Ticket, Prompt]]) -> None:
        if self._agent is None:
            self._agent = self.source.agent(self.sampling, ServiceRouter)
        agent, router = self._agent, self._router
        assert router is not None
        router.remember([one for ticket, _ in wanted for one in ticket.recorded])
        tasks = asyncio.create_task
        opening = [tasks(agent.open(prompt, s)) for ticket, prompt in wanted for s in ticket.left]
        playing: list[asyncio.Task[None]] = []
        try:
            if opening:
                await asyncio.wait(opening, timeout=TOGETHER_S)
            opened = iter(opening)
            for ticket, prompt in wanted:
                sample_tasks = {sample: next(opened) for sample in ticket.left}
                playing.append(tasks(self._group(agent, ticket, prompt, sample_tasks)))
            await asyncio.gather(*playing)
        except ActorFailed as error:
            # Every waiting task raised it: the frames of all of them would fill pages.
            self._tell(error.with_traceback(None))
        except BaseException as error:
            self._tell(error)
            raise
        finally:
            await close_all(agent, opening, playing)

    async def _group(
        self, agent: AgentLike, ticket: Ticket, prompt: Prompt, opened: Mapping[int, asyncio.Task[Any]]
    ) -> None:
        played, router = self._played[ticket.number], self._router
        assert router is not None

        async def play(sample: int) -> None:
            name = ticket.names[sample]
            # `close_all` cancels the opening tasks
            played[sample] = await agent.play(await asyncio.shield(opened[sample]), name)
            router.forget(name)

        playing = [asyncio.create_task(play(sample)) for sample in opened]
        try:
            await asyncio.gather(*playing)
        finally:  # if a sample fails, end the others before closing their environments
            for task in playing:
                task.cancel()
            await asyncio.gather(*playing, return_exceptions=True)
        self._tell(Done(ticket, Group(prompt, [played[sample] for sample in range(len(ticket.names))])))


def _is_kept(t: Trajectory) -> bool:
    """Returns True if a resumed run keeps the trajectory; a trajectory with an infrastructure fault is generated
    again."""
    return t.status is not Status.ERROR_INFRASTRUCTURE


class ServiceRouter(Router):
    """A router for a whole run. Requests without an engine wait until an engine is back in service."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.awaiting_sync: set[int] = set()
        """Ranks of engines that refused a request; cleared by the next weight sync."""
        self.journal = Journal()

    async def generate(self, request: Request) -> Completion:
        """Continues a prompt, or returns the recorded answer to the same request."""
        if (known := self.journal.answer(request)) is not None:
            return known
        completion = await super().generate(request)
        self.journal.keep(request, completion)
        return completion

    def remember(self, recorded: Sequence[RecordedTurn]) -> None:
        """Stores recorded turns of trajectories about to run."""
        self.journal.add(recorded)

    async def write_turns(self, folder: Path) -> list[RecordedTurn]:
        """Returns the turns of unfinished trajectories."""
        return self.journal.all()

    def forget(self, trajectory: str) -> None:
        """Drops the recorded turns of a finished trajectory."""
        self.journal.forget(trajectory)

    def rejoin(self) -> None:
        """Adds engines back in service after a weight sync and continues sending requests."""
        self.awaiting_sync.clear()
        self.rejoins += 1
        for engine in self.fleet.serving:
            self.load.setdefault(engine, load_of(self.fleet.facts[engine]))
        self._schedule()

    def _accepts(self, engine: int) -> bool:
        return super()._accepts(engine) and engine not in self.awaiting_sync

    def _postpone(self, engine: int, load: Load | None, batch: dict[str, QueuedRequest], began: int) -> bool:
        """Queues the requests of an engine whose weights are only partly updated. The weight sync with the rest calls
        `rejoin`, or did so since the request was sent."""
        if began == self.rejoins:
            self.awaiting_sync.add(engine)
        self._requeue(load, batch)
        return True

    def _fail_all(self, batch: dict[str, QueuedRequest], error: ActorFailed) -> None:
        """Queues all requests if an engine can restart; otherwise raises the error in all of them."""
        if isinstance(error, NoServingActor):
            self.queue.extendleft(reversed(batch.values()))
        else:
            super()._fail_all(batch, error)
