"""Actors that may fail and come back: which of them may be asked, and how one that failed is started again.

An actor is SERVING while it runs and is up to date. One that fails is ended, is STARTING again in the background, and
then STALE until somebody has brought it up to date. Nobody asks an actor that is not serving.

Parts of all of them may be put to sleep, so that others have the memory of their devices (`config.residency`). Nobody
is asked meanwhile, and one that failed starts when all parts are awake again: it needs all of its memory for that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from typing import Any

from skyrl_mega.cluster.errors import ActorFailed, NodeGone
from skyrl_mega.cluster.group import ActorGroup, Call, describe, end_processes, gather, settle
from skyrl_mega.cluster.last_words import with_cause
from skyrl_mega.config.residency import ENGINE

WEIGHTS, _ = ENGINE


class State(Enum):
    """What an actor can be asked for."""

    STARTING = "starting"
    STALE = "stale"
    """It runs; what it computes with is old, or nothing, or half of an update."""
    SERVING = "serving"


class NobodyServes(ActorFailed):
    """No actor of the fleet is serving; names the one that failed last, and why."""


class Fleet:
    """Actors that do the same work, by rank. All of them have been started when it is made.

    Args:
        group: Actors with `start(facts)`, which returns when one is ready to be brought up to date, and `sleep(parts)`
            and `wake(parts)`, as of `engines.base.Engine`.
        restarts: How many may be started again, all in all.
        start_timeout_s: Seconds until one is up again.
        say: Tells a person what happens.
        facts: By rank, what `start` returned; the one that comes into an actor's place is given it.
    """

    def __init__(
        self,
        group: ActorGroup,
        *,
        restarts: int,
        start_timeout_s: float,
        say: Callable[[str], None] = print,
        facts: Sequence[Any] | None = None,
    ) -> None:
        self.group, self.restarts, self.start_timeout_s, self.say = group, restarts, start_timeout_s, say
        self.facts: list[Any] = [None] * len(group) if facts is None else list(facts)
        self.make_room: Callable[[int], AbstractContextManager[None]] = lambda rank: nullcontext()
        """Entered with the rank of an actor that is about to be started again: what else is on its devices gives its
        memory back. Left when the actor is up, and has put to sleep what sleeps of the others; then it may take it."""
        self.asleep: frozenset[str] = frozenset()
        """Parts that none of them has on its device."""
        self.states = [State.STALE] * len(group)
        self._starting: dict[int, Future[None]] = {}
        self._threads = ThreadPoolExecutor(len(group), thread_name_prefix="restart")
        self._last: ActorFailed | None = None
        self._lock = threading.RLock()
        """Those who generate and those who sync may find at the same time that one has failed."""
        self._ending: dict[int, Future[None]] = {}
        """Those of which the next one's start has not begun: their memory is given back."""

    @property
    def serving(self) -> list[int]:
        """Ranks that may be asked."""
        return [] if self.asleep else [rank for rank, state in enumerate(self.states) if state is State.SERVING]

    @property
    def up(self) -> list[int]:
        """Ranks that run, asleep or up to date or not."""
        return [rank for rank, state in enumerate(self.states) if state is not State.STARTING]

    def present(self) -> list[int]:
        """Ranks that are up, up to date or not. Waits only where there is none: then those that fail to be there are
        started whatever is asleep, as room is made for them.

        Raises:
            ActorFailed: None comes back; the root cause.
            NodeGone: One cannot come back, as its node is gone.
        """
        while True:
            self._take_in()
            if up := self.up:
                return up
            self._begin()
            # Nobody may start any more once those for whom room was made have come.
            wait([*self._starting.values()], return_when="ALL_COMPLETED" if self.asleep else "FIRST_COMPLETED")

    def _take_in(self) -> None:
        with self._lock:
            for rank, starting in list(self._starting.items()):
                if starting.done():
                    self._arrive(rank, starting)

    def _arrive(self, rank: int, starting: Future[None]) -> None:
        error = starting.exception()
        if error is not None and (isinstance(error, NodeGone) or not _own(error, self.group.name)):
            # It cannot be started again where it was, and the run finds new places; or others failed. It is not up,
            # and whoever looks again is told again.
            raise error
        del self._starting[rank]
        self.states[rank] = State.STALE
        if error is None:
            self.say(f"{self.group.name}-{rank} is up again, and waits to be brought up to date")
        else:
            self.retire(rank, str(error))

    def serve(self, ranks: Collection[int]) -> None:
        """These are up to date, but for those that have failed since; others that were are not, from now on."""
        with self._lock:
            for rank, state in enumerate(self.states):
                if rank in ranks and state is not State.STARTING:
                    self.states[rank] = State.SERVING
                elif state is State.SERVING:
                    self.states[rank] = State.STALE

    def retire(self, rank: int, cause: str) -> None:
        """Takes an actor out of service, ends its processes and starts it again in the background.

        Raises:
            ActorFailed: `restarts` have been used up.
        """
        with self._lock:
            self._retire(rank, cause)

    def _retire(self, rank: int, cause: str) -> None:
        if self.states[rank] is State.STARTING:
            return
        name, cause = f"{self.group.name}-{rank}", with_cause(cause, self.group.logs[rank])
        self._last = ActorFailed(name, rank, "service", f"{cause}; its log: {self.group.logs[rank]}")
        if self.restarts <= 0:
            raise self._last
        self.restarts -= 1
        self.states[rank] = State.STARTING
        self.say(f"{name} is out of service: {cause}; it is started again ({self.restarts} restarts are left)")
        self._ending[rank] = self._threads.submit(self.group.replace, rank, self.start_timeout_s)
        if not self.asleep:
            self._begin()

    def _begin(self) -> None:
        """Those that have ended are started, in the background."""
        with self._lock:
            for rank, ended in self._ending.items():
                self._starting[rank] = self._threads.submit(self._start, rank, ended)
            self._ending = {}

    def _start(self, rank: int, ended: Future[None]) -> None:
        ended.result()  # each is bounded by `start_timeout_s`
        with self.make_room(rank):
            try:
                gather([self.group.submit(rank, "start", self.facts[rank])], self.start_timeout_s)
                if self.asleep:
                    gather([self.group.submit(rank, "sleep", sorted(self.asleep))], self.start_timeout_s)
            except BaseException:
                end_processes(self.group.where[rank])  # what it has taken so far is what others need
                raise

    def sleep(self, parts: Collection[str]) -> None:
        """Puts parts of all to sleep; one that fails is retired. Waits for those that are being started, as they take
        memory. Without its weights none is up to date any more.

        Raises:
            ActorFailed: `restarts` have been used up.
            NodeGone: One cannot come back, as its node is gone.
        """
        wait(self._starting.values())
        self.asleep |= set(parts)
        self._take_in()
        if WEIGHTS in parts:
            self.serve([])
        self._settle(self.up, "sleep", self.start_timeout_s, sorted(parts))

    def wake(self, parts: Collection[str]) -> None:
        """Wakes parts of all; one that fails is retired. Once all parts are awake, those start that failed since.

        Raises:
            ActorFailed: `restarts` have been used up.
        """
        self._settle(self.up, "wake", self.start_timeout_s, sorted(parts))
        self.asleep -= set(parts)
        if not self.asleep:
            self._begin()

    def _settle(self, ranks: Collection[int], method: str, timeout: float, *args: Any) -> None:
        """Calls these; one that fails or does not answer is retired."""
        outcomes = settle(self.submit(ranks, method, *args), timeout, after_failure=timeout)
        for call, error in outcomes.failures:
            self.retire(call.rank, f"{method}: {describe(error)}")
        for call in outcomes.silent:
            self.retire(call.rank, f"{method}: no answer within {timeout:g} s")

    def submit(self, ranks: Collection[int], method: str, *args: Any) -> list[Call]:
        """Starts one call at each of these."""
        return [self.group.submit(rank, method, *args) for rank in ranks]

    def ask(self, method: str, timeout: float) -> None:
        """Calls all that serve; one that fails or does not answer is retired.

        Raises:
            NobodyServes: None is left.
            ActorFailed: `restarts` have been used up.
        """
        self._settle(self.serving, method, timeout)
        self.check()

    def check(self) -> None:
        """Raises NobodyServes where that is so."""
        if self.asleep:
            cause = f"asleep: {', '.join(sorted(self.asleep))}; `wake` comes before a request"
            raise NobodyServes(self.group.name, 0, "service", cause)
        if not self.serving:
            last = self._last or ActorFailed(self.group.name, 0, "service", "none has been brought up to date")
            raise NobodyServes(last.actor, last.rank, last.method, last.cause)

    def close(self) -> None:
        """Starts nothing more. The actors are the group's to end."""
        self.restarts = 0
        self._threads.shutdown(wait=False, cancel_futures=True)


def _own(error: BaseException, name: str) -> bool:
    """Whether an actor of the fleet failed, and nobody who was to make room for it."""
    return isinstance(error, ActorFailed) and error.actor.rpartition("-")[0] == name
