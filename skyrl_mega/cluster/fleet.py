"""Actors that may fail and come back: which of them may be asked, and how one that failed is started again.

An actor is SERVING while it runs and is up to date. One that fails is ended, is STARTING again in the background, and
then STALE until somebody has brought it up to date. Nobody asks an actor that is not serving.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from enum import Enum
from typing import Any

from skyrl_mega.cluster.errors import ActorFailed, NodeGone
from skyrl_mega.cluster.group import ActorGroup, Call, describe, gather, settle
from skyrl_mega.cluster.last_words import with_cause


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
        group: Actors with `start(facts)`, which returns when one is ready to be brought up to date.
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
        self.make_room: Callable[[int], None] | None = None
        """Called with the rank of an actor that is about to be started again: what else is on its devices gives back
        memory that it does not need."""
        self.states = [State.STALE] * len(group)
        self._starting: dict[int, Future[None]] = {}
        self._threads = ThreadPoolExecutor(len(group), thread_name_prefix="restart")
        self._last: ActorFailed | None = None

    @property
    def serving(self) -> list[int]:
        """Ranks that may be asked."""
        return [rank for rank, state in enumerate(self.states) if state is State.SERVING]

    def present(self) -> list[int]:
        """Ranks that are up, up to date or not. Waits only where there is none.

        Raises:
            ActorFailed: None comes back; the root cause.
            NodeGone: One cannot come back, as its node is gone.
        """
        while True:
            for rank, starting in list(self._starting.items()):
                if starting.done():
                    self._arrive(rank, starting)
            up = [rank for rank, state in enumerate(self.states) if state is not State.STARTING]
            if up:
                return up
            wait(self._starting.values(), return_when="FIRST_COMPLETED")  # each is bounded by `start_timeout_s`

    def _arrive(self, rank: int, starting: Future[None]) -> None:
        del self._starting[rank]
        self.states[rank] = State.STALE
        error = starting.exception()
        if error is None:
            self.say(f"{self.group.name}-{rank} is up again, and waits to be brought up to date")
        elif isinstance(error, ActorFailed) and not isinstance(error, NodeGone):
            self.retire(rank, str(error))
        else:  # it cannot be started again where it was; the run finds new places
            raise error

    def serve(self, ranks: Collection[int]) -> None:
        """These are up to date; others that were are not, from now on."""
        for rank, state in enumerate(self.states):
            if rank in ranks:
                self.states[rank] = State.SERVING
            elif state is State.SERVING:
                self.states[rank] = State.STALE

    def retire(self, rank: int, cause: str) -> None:
        """Takes an actor out of service, ends its processes and starts it again in the background.

        Raises:
            ActorFailed: `restarts` have been used up.
        """
        if self.states[rank] is State.STARTING:
            return
        name, cause = f"{self.group.name}-{rank}", with_cause(cause, self.group.logs[rank])
        self._last = ActorFailed(name, rank, "service", f"{cause}; its log: {self.group.logs[rank]}")
        if self.restarts <= 0:
            raise self._last
        self.restarts -= 1
        self.states[rank] = State.STARTING
        self.say(f"{name} is out of service: {cause}; it is started again ({self.restarts} restarts are left)")
        self._starting[rank] = self._threads.submit(self._restart, rank)

    def _restart(self, rank: int) -> None:
        self.group.replace(rank, self.start_timeout_s)
        if self.make_room is not None:
            self.make_room(rank)
        gather([self.group.submit(rank, "start", self.facts[rank])], self.start_timeout_s)

    def submit(self, ranks: Collection[int], method: str, *args: Any) -> list[Call]:
        """Starts one call at each of these."""
        return [self.group.submit(rank, method, *args) for rank in ranks]

    def ask(self, method: str, timeout: float) -> None:
        """Calls all that serve; one that fails or does not answer is retired.

        Raises:
            NobodyServes: None is left.
            ActorFailed: `restarts` have been used up.
        """
        outcomes = settle(self.submit(self.serving, method), timeout, after_failure=timeout)
        for call, error in outcomes.failures:
            self.retire(call.rank, f"{method}: {describe(error)}")
        for call in outcomes.silent:
            self.retire(call.rank, f"{method}: no answer within {timeout:g} s")
        self.check()

    def check(self) -> None:
        """Raises NobodyServes where that is so."""
        if not self.serving:
            last = self._last or ActorFailed(self.group.name, 0, "service", "none has been brought up to date")
            raise NobodyServes(last.actor, last.rank, last.method, last.cause)

    def close(self) -> None:
        """Starts nothing more. The actors are the group's to end."""
        self.restarts = 0
        self._threads.shutdown(wait=False, cancel_futures=True)
