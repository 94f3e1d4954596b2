"""The engines of a run: a supervised group whose actors need the current weights before they serve, and may join and
leave while the run trains.

A running engine is stale until a weight sync: its weights are old, missing or half updated. Only engines with current
weights receive requests; a restarted engine is stale.

Parts of all actors can be put to sleep to free device memory for other processes (`config.residency`). A fleet with
sleeping parts accepts no requests. After a failure during this time, the restart waits until all parts are awake again,
because an actor needs all of its memory to start.

An actor that joins is stale until the next weight sync. An actor that leaves gets no new requests; its requests finish,
or move to other actors like the requests of a dead actor. Joined actors have a restart budget of their own, and never
end the run: a joined actor that cannot be kept leaves.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from skyrl_mega.cluster.calls import PendingCall, gather, settle
from skyrl_mega.cluster.errors import ActorFailed, ClusterError, NodeGone, describe
from skyrl_mega.cluster.group import ActorGroup, ActorSpec, end_processes
from skyrl_mega.cluster.supervised_group import ALIVE, State, SupervisedGroup
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.residency import ENGINE
from skyrl_mega.telemetry.events import Event

WEIGHTS, _ = ENGINE


class NoServingActor(ActorFailed):
    """No actor of the fleet is serving. Names the most recently failed actor and the cause."""


class Fleet(SupervisedGroup):
    """Interchangeable actors, by rank. All of them must be running when the fleet is created; `add` adds others.

    Args:
        group: Actors with the methods `start(facts)` (returns when the actor is ready for a weight sync),
            `sleep(parts)`, `wake(parts)` and `drain()` of `engines.base.Engine`.
        restarts: Restart budget of the actors of the start, and a second budget of the same size for joined actors.
        start_timeout_s: Seconds until a restarted actor is up.
        say: Prints a message for the user.
        facts: Return values of `start`, by rank; each is passed on to the `start` of the replacement actor.
    """

    back_note = "; it serves again after the next weight sync"

    def __init__(
        self,
        group: ActorGroup,
        *,
        restarts: int,
        start_timeout_s: float,
        say: Callable[[str], None] = print,
        facts: Sequence[Any] | None = None,
    ) -> None:
        super().__init__(group, restarts=restarts, start_timeout_s=start_timeout_s, say=say)
        self.facts: list[Any] = [None] * len(group) if facts is None else list(facts)
        self.make_room: Callable[[int], AbstractContextManager[None]] = lambda rank: nullcontext()
        """Entered with the rank of an actor before its restart: frees the memory that other processes use on its
        devices.

        Left when the actor is up and has put the fleet's sleeping parts to sleep. The other processes may then take the
        memory back.
        """
        self.asleep: frozenset[str] = frozenset()
        """Parts that no actor currently holds on its device."""
        self.joined: set[int] = set()
        """Ranks of all actors added by `add`, including actors that have left."""
        self.joined_restarts = restarts
        """Restarts left for joined actors."""
        self.joins = 0
        """Number of actors that joined and came up."""
        self.updating = threading.Lock()
        """Held during a weight sync: a leaving actor is not ended in the middle of a transfer."""
        self._current: set[int] = set()
        """Ranks with the current weights."""
        self._served: set[int] = set()
        """Ranks that had current weights at least once."""
        self._ending: dict[int, Future[None]] = {}
        """Rank -> replacement of the failed actor's processes, which frees its memory, until the new actor's `start` is
        submitted."""

    @property
    def serving(self) -> list[int]:
        """Ranks ready for requests; empty while parts are asleep."""
        return [] if self.asleep else [rank for rank in self.up if rank in self._current]

    @property
    def left(self) -> list[int]:
        """Ranks of actors that are leaving or have left for good, in order.

        Among them are joined actors that failed to start or have no restart left. An actor of the run's start that has
        no restart left is given up instead, and is not among them.
        """
        return self.ranks(State.LEAVING, State.GONE)

    def out_of_service(self) -> tuple[int, list[int]]:
        """Returns the number of all ranks, and the ranks that have left or have not joined yet."""
        states = [*self.states]
        return len(states), [rank for rank, state in enumerate(states) if state in (State.JOINING, State.GONE)]

    def is_new(self, rank: int) -> bool:
        """Returns True if the actor of this rank joined during the run and has never had current weights."""
        return rank in self.joined and rank not in self._served

    def add(self, spec: ActorSpec) -> int:
        """Starts a further actor in the background and returns the new rank, without waiting.

        The actor takes part in the first weight sync after its start, and serves from then on. An actor that is not up
        within `start_timeout_s`, or fails before its first sync, leaves by itself, with an event.

        Args:
            spec: Class, arguments and place of the actor.

        Raises:
            ClusterError: The fleet is closed, its group has been shut down, or parts are asleep.
        """
        with self._lock:
            if self._closed or self.asleep:
                raise ClusterError(f"no {self.group.name} can join: {'parts are asleep' if self.asleep else 'the end'}")
            rank = self.group.add(spec)
            self.facts.append(None)
            self.states.append(State.JOINING)
            self.joined.add(rank)
            self._starting[rank] = self._threads.submit(self._join, rank)
        return rank

    def finish_joins(self) -> None:
        """Updates the state of joined actors with a finished start or restart, and reports the events. Does not
        wait."""
        with self._lock:
            for rank, starting in [*self._starting.items()]:
                if rank in self.joined and starting.done():
                    self._finish_join(rank, starting.exception())

    def leave(self, rank: int, cause: str, grace_s: float) -> None:
        """Takes an actor out of the fleet for good, without waiting and without a restart: the actor gets no new
        requests, and is ended in the background once its requests are finished; the event `engine_left` reports the
        end. Does nothing for an actor that is leaving or has left already.

        Args:
            rank: The actor's rank.
            cause: Reason for the message.
            grace_s: Seconds for the requests to finish; the others then move to other actors. 0 ends the actor at once,
                for a lost node.

        Raises:
            UserError: There is no such actor, it is given up, or with a grace time no other actor would be left that
                runs or restarts.
        """
        with self._lock:
            self._check_leave([rank], last=not grace_s)
            if self.states[rank] not in ALIVE:
                return
            idle = self.states[rank] is not State.UP
            self.states[rank] = State.LEAVING
            self._current.discard(rank)
            if not grace_s:
                self.last_failure = ActorFailed(self.group.name, rank, "service", cause, log=self.group.logs[rank])
                cause = self.last_failure.cause
            if self._closed:
                return
            starting = [f for f in (self._starting.pop(rank, None), self._ending.pop(rank, None)) if f is not None]
            self._threads.submit(self._depart, rank, cause, 0.0 if idle else grace_s, starting)

    def check_leave(self, ranks: Sequence[int]) -> None:
        """Checks that all of these actors may leave, before the first of them does.

        Raises:
            UserError: One of them does not exist or is given up, or no other actor would be left that runs or restarts.
        """
        with self._lock:
            self._check_leave(ranks)

    def _check_leave(self, ranks: Sequence[int], *, last: bool = False) -> None:
        """Raises UserError for an unknown actor, and unless `last`, for the last ones. Expects the lock."""
        for rank in ranks:
            if not 0 <= rank < len(self.states) or self.states[rank] is State.GIVEN_UP:
                raise UserError(f"allowed is one of {self.ranks(*ALIVE)}", key="engine", value=rank)
        leaving = [rank for rank in ranks if self.states[rank] in ALIVE]
        if leaving and not last and not set(self.ranks(State.UP, State.STARTING)) - {*leaving}:
            raise UserError("no other engine runs; add an engine first", key="engine", value=leaving[0])

    def _join(self, rank: int) -> None:
        """Starts an added actor; ends the actor after an error."""
        until = time.monotonic() + self.start_timeout_s
        try:
            self.group.bring_up(rank, self.start_timeout_s)
            call = self.group.submit(rank, "start", None)
            self.facts[rank] = gather([call], max(0.0, until - time.monotonic()))[0]
        except BaseException:
            self.group.end(rank)
            raise

    def _depart(self, rank: int, cause: str, grace_s: float, starting: list[Future[None]]) -> None:
        """Waits for the requests of a leaving actor, and ends the actor."""
        until = time.monotonic() + grace_s
        finished = True
        if grace_s:
            finished = bool(settle([self.group.submit(rank, "drain")], grace_s, after_failure=0.0).answers)
            if self.updating.acquire(timeout=max(0.0, until - time.monotonic())):
                self.updating.release()  # a later sync does without the actor
        self.group.end(rank)
        for future in starting:  # a restart under way may still start a new process
            if not future.cancel():
                wait([future], timeout=2 * self.start_timeout_s)
                self.group.end(rank)
        rest = "" if finished else "; its unfinished requests move to other engines"
        self._gone(rank, "engine_left", f"left: {cause}{rest}", cause)

    def _gone(self, rank: int, kind: str, text: str, cause: str) -> None:
        """Marks an actor as gone, and reports the event."""
        with self._lock:
            self.states[rank] = State.GONE
        name = f"{self.group.name}-{rank}"
        if not self._closed:
            self.say(Event(kind, f"{name} {text}", actor=name, rank=rank, cause=cause))

    def running(self) -> dict[int, Any]:
        """Takes finished restarts into service, and returns rank → actor of the running actors, as a `SupervisedGroup`
        does. Empty if no actor runs yet, but at least one starts.

        Raises:
            ActorFailed: An actor is given up, even if others run: between two requests no other call reports the
                failure. Or no actor is left, or freeing memory for a restart failed.
            NodeGone: An actor cannot be restarted because the node is gone.
        """
        running = super().running()
        if self.last_failure is not None and self.ranks(State.GIVEN_UP):
            raise self.last_failure
        return running

    def ensure_running(self) -> list[int]:
        """Returns the running ranks, at least one, including stale ranks (without the current weights). If no actor
        runs, starts the failed actors and waits for the first. Every start is bounded by `start_timeout_s`.

        While parts are asleep, GPU memory is freed first (`make_room`) and all of these restarts are awaited.

        Raises:
            ActorFailed: An actor is given up, even if others run; names the root cause. Or no actor is left, or freeing
                memory for a restart failed.
            NodeGone: An actor cannot be restarted because the node is gone.
        """
        while True:
            if running := self.running():
                return [*running]
            self._start_ended()
            # While asleep, other processes take their memory back after `make_room`: no start may still be running
            # then.
            wait([*self._starting.values()], return_when="ALL_COMPLETED" if self.asleep else "FIRST_COMPLETED")

    def _finish_restart(self, rank: int, error: BaseException | None) -> None:
        if rank in self.joined:
            self._finish_join(rank, error)
            return
        if error is not None and (isinstance(error, NodeGone) or not _failed_in_fleet(error, self.group.name)):
            # Either the node is gone and the run must choose new nodes, or another group failed. The rank stays
            # STARTING, so each later call raises the same error.
            raise error
        super()._finish_restart(rank, error)

    def _finish_join(self, rank: int, error: BaseException | None) -> None:
        """Handles the end of the start or the restart of a joined actor."""
        joining = self.states[rank] is State.JOINING
        if not joining and (error is None or (isinstance(error, ActorFailed) and not isinstance(error, NodeGone))):
            super()._finish_restart(rank, error)
            return
        del self._starting[rank]
        if error is not None:
            self.joined_restarts += isinstance(error, NodeGone) and not joining  # a lost node is no fault of the engine
            self.last_failure = error if isinstance(error, ActorFailed) else self.last_failure
            kind, text = ("engine_not_joined", "did not join") if joining else ("engine_left", "left")
            self._gone(rank, kind, f"{text}: {error}", describe(error))
            return
        self.states[rank] = State.UP
        self.joins += 1
        name, where = f"{self.group.name}-{rank}", self.group.where[rank].address
        text = f"{name} joined on {where}{self.back_note}"
        self.say(Event("engine_joined", text, actor=name, rank=rank, address=where))

    def serve(self, ranks: Collection[int]) -> None:
        """Marks the actors of these ranks as holding the current weights, so that they serve; ranks failed in the
        meantime are skipped. All other running ranks become stale: they get no requests until a later call names them.
        """
        with self._lock:
            self._current = {*ranks} & {*self.up}
            self._served |= self._current

    def retire(self, rank: int, error: BaseException | str) -> None:
        """Takes a running actor out of service, ends its processes and starts a replacement in the background, without
        waiting; prints the failure. Does nothing if the actor does not run. An actor that joined during the run leaves
        instead (`leave`) if it never served, or the joined actors' budget is used up.

        Args:
            rank: The actor's rank.
            error: The failure, or a text about the failure.

        Raises:
            ActorFailed: The restart budget is used up, now or at an earlier failure of this actor.
        """
        with self._lock:
            if rank in self.joined and self.states[rank] is State.UP and not self._may_restart(rank):
                self.leave(rank, describe(error), 0.0)
                return
            super().retire(rank, error)
        if self.states[rank] is State.GIVEN_UP:
            assert self.last_failure is not None
            raise self.last_failure

    def _may_restart(self, rank: int) -> bool:
        """Returns True if a joined actor may be restarted: after its first weight sync, within the budget."""
        return self.joined_restarts > 0 and rank in self._served and not self._closed

    def _spend(self, rank: int) -> bool:
        if rank not in self.joined:
            return super()._spend(rank)
        self.joined_restarts -= 1
        return True

    def _budget(self, rank: int) -> int:
        return self.joined_restarts if rank in self.joined else super()._budget(rank)

    def _restart(self, rank: int) -> None:
        self._current.discard(rank)
        self._ending[rank] = self._threads.submit(self.group.replace, rank, self.start_timeout_s)
        if not self.asleep:
            self._start_ended()

    def _start_ended(self) -> None:
        """Submits the restart of every ended actor to the background threads."""
        with self._lock:
            for rank, ended in self._ending.items():
                self._starting[rank] = self._threads.submit(self._start, rank, ended)
            self._ending = {}

    def _start(self, rank: int, ended: Future[None]) -> None:
        ended.result()  # returns within `start_timeout_s`
        with self.make_room(rank):
            try:
                gather([self.group.submit(rank, "start", self.facts[rank])], self.start_timeout_s)
                if self.asleep:
                    gather([self.group.submit(rank, "sleep", sorted(self.asleep))], self.start_timeout_s)
            except BaseException:
                end_processes(self.group.where[rank])  # other processes need the memory that it has already allocated
                raise

    def sleep(self, parts: Collection[str]) -> None:
        """Waits for running restarts, because a restart allocates memory; then puts parts of all actors to sleep, and
        waits at most `start_timeout_s` for this. A failed actor is retired, and restarts once all parts are awake
        again. If the weights go to sleep, every actor becomes stale: no actor serves until the next weight sync.

        Args:
            parts: "engine_weights", "kv_cache" (`config.residency.ENGINE`).

        Raises:
            ActorFailed: The restart budget is used up, now or earlier.
            NodeGone: An actor cannot be restarted because the node is gone.
        """
        wait(self._starting.values())
        self.asleep |= set(parts)
        self.running()
        if WEIGHTS in parts:
            self.serve([])
        self.call_or_retire(self.up, "sleep", self.start_timeout_s, sorted(parts))

    def wake(self, parts: Collection[str]) -> None:
        """Wakes parts of all actors, and waits at most `start_timeout_s`; retires actors on failure. When all parts are
        awake, starts the postponed restarts.

        Args:
            parts: "engine_weights", "kv_cache" (`config.residency.ENGINE`).

        Raises:
            ActorFailed: The restart budget is used up.
        """
        self.call_or_retire(self.up, "wake", self.start_timeout_s, sorted(parts))
        self.asleep -= set(parts)
        if not self.asleep:
            self._start_ended()

    def call_or_retire(self, ranks: Collection[int], method: str, timeout: float, *args: Any) -> dict[int, Any]:
        """Calls a method of these ranks, waits, and returns the answers by rank; retires each rank on failure or after
        `timeout` seconds. Raises ActorFailed if the restart budget is used up."""
        outcomes = settle(self.submit(ranks, method, *args), timeout, after_failure=timeout)
        for call, error in outcomes.failures:
            self.retire(call.rank, f"{method}: {describe(error)}")
        for call in outcomes.silent:
            self.retire(call.rank, f"{method}: no answer within {timeout:g} s")
        return {call.rank: answer for call, answer in outcomes.answers.items()}

    def submit(self, ranks: Collection[int], method: str, *args: Any) -> list[PendingCall]:
        """Starts a call of `method` at each of these ranks without waiting; `gather` or `settle` waits for the
        answers."""
        return [self.group.submit(rank, method, *args) for rank in ranks]

    def ask(self, method: str, timeout: float) -> None:
        """Calls a method of all serving actors and waits; retires actors on failure or time-out. The answers are
        dropped.

        Args:
            method: Name of a method without arguments.
            timeout: Time limit in seconds.

        Raises:
            NoServingActor: No serving actor is left, or none was serving, or parts are asleep.
            ActorFailed: The restart budget is used up.
        """
        self.call_or_retire(self.serving, method, timeout)
        self.check()

    def check(self) -> None:
        """Raises NoServingActor if no actor is serving, with the cause of the latest failure, or because parts are
        asleep."""
        if self.asleep:
            cause = f"the engines are asleep: {', '.join(sorted(self.asleep))}; call `wake` before a request"
            raise NoServingActor(self.group.name, None, "service", cause)
        if not self.serving:
            never = ActorFailed(
                self.group.name, None, "service", "none has received the current weights yet; sync the weights first"
            )
            last = self.last_failure or never
            raise NoServingActor(last.group, last.rank, last.method, last.cause, log=last.log)


def _failed_in_fleet(error: BaseException, name: str) -> bool:
    """Returns True if the failed actor belongs to the fleet, False if freeing memory for the restart failed."""
    return isinstance(error, ActorFailed) and error.group == name
