"""Asynchronous rollouts: groups of trajectories submitted at any time, and finished in any order, while training goes
on.

A phase begins and ends, and uses a single version of the weights. In a service, weights change during a trajectory, and
engines fail, restart and catch up while requests wait.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from skyrl_mega.cluster.errors import ActorFailed
from skyrl_mega.cluster.fleet import Fleet, NoServingActor
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.rollout import journal
from skyrl_mega.rollout.event_loop import ServiceLoop, cancel_all
from skyrl_mega.rollout.gate import Gate, Start
from skyrl_mega.rollout.journal import RecordedTurn
from skyrl_mega.rollout.player import Player, PlaysGroups
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
        """Numbers of the samples left to generate: all without an entry in `played`."""
        return [sample for sample in range(len(self.names)) if sample not in self.played]


@dataclass(frozen=True)
class Done:
    """A finished group."""

    ticket: Ticket
    group: Group


class RolloutService:
    """A service that generates groups in a background loop while the caller does other work.

    Args:
        player: Runs the trajectories, or whole groups, with a router for a service.
        fleet: The engines of the player.
        loop: The event loop of the player.
        timeout_s: Seconds for the engines to forget cached prefixes (`rollout.request_timeout_s`).
        own: True if the player runs whole groups (`rollout.generator`).
    """

    def __init__(
        self,
        player: Player | PlaysGroups,
        fleet: Fleet,
        loop: ServiceLoop,
        timeout_s: float,
        *,
        own: bool = False,
    ) -> None:
        self.own = own
        self.player, self.fleet, self.loop, self.timeout_s = player, fleet, loop, timeout_s
        self.under_way: dict[int, Ticket] = {}
        """Number → ticket of each unfinished group; used only by the caller's thread."""
        self._played: dict[int, dict[int, Trajectory]] = {}
        """Number → finished samples of each unfinished group."""
        self._done: deque[Done | BaseException] = deque()

    @property
    def served(self) -> bool:
        """True if at least one engine accepts requests; engines waiting for a weight sync do not count."""
        return bool({*self.fleet.serving} - self.player.router.awaiting_sync)

    def submit(self, tickets: Sequence[Ticket], prompts: Sequence[Prompt]) -> None:
        """Starts to generate a group for each ticket (a requested group) and returns at once; `done` returns the
        groups. `prompts` are the tickets' prompts in the same order. As in a phase, all environments are opened before
        the first trajectory runs, but slow environments delay the other groups by at most `TOGETHER_S`. Samples in a
        ticket's `played` (from a checkpoint) do not run again.

        If no group is under way, the engines first forget cached prefixes, which takes up to `timeout_s`. Without
        tickets nothing happens. A missing engine is not an error while engines restart: the requests wait.

        Raises:
            ActorFailed: The restart budget is used up.
        """
        if not tickets:
            return
        if not self.under_way:
            with suppress(NoServingActor):  # requests wait for an engine to restart
                # As before a phase: cached prefixes would change the last bits.
                self.fleet.ask("forget", timeout=self.timeout_s)
        self.under_way |= {ticket.number: ticket for ticket in tickets}
        self._played |= {ticket.number: {**ticket.played} for ticket in tickets}
        self.loop.start(self._play(list(zip(tickets, prompts, strict=True))))

    def done(self, wait_s: float) -> list[Done]:
        """Returns the groups finished since the last call, in the order of their ends. If there is none, waits up to
        `wait_s` seconds for the first; [] if none came.

        Raises:
            ActorFailed: An engine refused a request, or no engine is left and none restarts; with the root cause.
                Groups that finished at the same time are lost.
            Exception: Any other error of a group's work, such as a chat template that leaves out the assistant's words.
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
        """Writes the recorded turns of unfinished trajectories into `folder`, replacing existing files: a file from
        this process and one from each rollout worker (`journal.file_of`). `folder` must exist.

        Raises:
            ActorFailed: A rollout worker could not write the file; the turns of a crashed or slow one are only lost.
            OSError: This process could not write the file.
        """
        turns = self.loop.run(self.player.router.write_turns(folder))
        journal.write(journal.file_of(folder, "driver"), turns)  # in this thread: the loop is busy with trajectories

    def so_far(self) -> list[Ticket]:
        """Returns copies of the tickets of unfinished groups, with the samples finished so far in `played`; samples
        with an infrastructure fault are left out."""
        return [
            replace(ticket, played={s: t for s, t in dict(self._played[number]).items() if _is_kept(t)})
            for number, ticket in self.under_way.items()
        ]

    def engines_changed(self) -> None:
        """Reports a weight sync to the router, so that the updated engines accept requests again. Does not wait."""
        self.loop.call(self.player.router.rejoin)

    def _tell(self, outcome: Done | BaseException) -> None:
        self._done.append(outcome)
        self.loop.changed()

    async def _play(self, wanted: list[tuple[Ticket, Prompt]]) -> None:
        self.player.router.journal.add([turn for ticket, _ in wanted for turn in ticket.recorded])
        playing = [asyncio.create_task(work) for work in self._work(wanted)]
        try:
            await asyncio.gather(*playing)
        except ActorFailed as error:
            self._tell(error)
        except BaseException as error:
            self._tell(error)
            raise
        finally:
            await cancel_all(playing)

    def _work(self, wanted: list[tuple[Ticket, Prompt]]) -> list[Coroutine[Any, Any, None]]:
        """Returns the coroutine of each wanted group."""
        if self.own:
            gate, player = Gate(len(wanted), TOGETHER_S), cast(PlaysGroups, self.player)
            return [self._own_group(player, *one, start) for one, start in zip(wanted, gate.starts, strict=True)]
        starts = iter(Gate(sum(len(ticket.left) for ticket, _ in wanted), TOGETHER_S).starts)
        return [
            self._group(ticket, prompt, {sample: next(starts) for sample in ticket.left}) for ticket, prompt in wanted
        ]

    async def _own_group(self, player: PlaysGroups, ticket: Ticket, prompt: Prompt, start: Start) -> None:
        """Runs a whole group by a generator of the user."""
        trajectories = await player.play_group(prompt, ticket.names, start)
        for name in ticket.names:
            player.router.journal.forget(name)
        self._tell(Done(ticket, Group(prompt, trajectories)))

    async def _group(self, ticket: Ticket, prompt: Prompt, starts: Mapping[int, Start]) -> None:
        """Runs the samples of a group that are left: sample → `start`."""
        played = self._played[ticket.number]

        async def play(sample: int, start: Start) -> None:
            name = ticket.names[sample]
            played[sample] = await cast(Player, self.player).play(prompt, sample, name, start)
            self.player.router.journal.forget(name)

        playing = [asyncio.create_task(play(sample, start)) for sample, start in starts.items()]
        try:
            await asyncio.gather(*playing)
        finally:  # if a sample fails, end the others
            await cancel_all(playing)
        self._tell(Done(ticket, Group(prompt, [played[sample] for sample in range(len(ticket.names))])))


def _is_kept(t: Trajectory) -> bool:
    """Returns True if a resumed run keeps the trajectory; a trajectory with an infrastructure fault is generated
    again."""
    return t.status is not Status.ERROR_INFRASTRUCTURE
