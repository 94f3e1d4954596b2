"""Calls to Ray actors: waits with a time limit, and failures with a root cause."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from skyrl_mega.cluster.errors import ActorFailed, ActorTimeout, NodeGone, cause_of, describe
from skyrl_mega.common.errors import UserError

SETTLE_S = 2.0
"""Seconds to keep collecting errors after the first: peers of a dead actor complain before Ray reports the death."""
Waiting = Callable[[Sequence[str]], None]
"""Receives the names of the actors that a call still waits for."""


@dataclass(frozen=True)
class PendingCall:
    """A started call to an actor, with the reference to its answer."""

    group: str
    """Name of the actor's group."""
    rank: int
    """The actor's rank in the group."""
    method: str
    """Name of the called method."""
    ref: Any
    """Ray's reference to the answer."""
    log: str | None = None
    """The actor's log file, for errors; None without one."""

    @property
    def actor(self) -> str:
        """The actor's name, such as `policy-3`."""
        return f"{self.group}-{self.rank}"


@dataclass(frozen=True)
class Outcomes:
    """Answers, failures and missing answers of a set of calls."""

    timeout: float
    """Time limit of the calls in seconds."""
    answers: dict[PendingCall, Any]
    """Return values of the calls that succeeded."""
    failures: list[tuple[PendingCall, BaseException]]
    """Failed calls and errors, in order of arrival."""
    silent: list[PendingCall]
    """Calls without an answer at the end of the wait, at the time limit or some time after the first failure."""

    @property
    def causes(self) -> dict[int, str]:
        """Rank → cause of every call that failed or has no answer, for calls to a single group."""
        silent = {call.rank: f"no answer within {self.timeout:g} s" for call in self.silent}
        return {call.rank: describe(error) for call, error in self.failures} | silent

    def raise_first(self) -> NoReturn:
        """Raises the root cause: the first actor death, else the first error, else the timeout. To be called only if
        `failures` or `silent` is not empty.

        Raises:
            UserError: The root cause, if an actor raised a UserError.
            ActorFailed: Any other root cause: an actor died or raised another error.
            NodeGone: The intended node of the actor no longer exists.
            ActorTimeout: Nothing failed, and some calls are unanswered.
        """
        import ray

        if not self.failures:
            first = self.silent[0]
            raise ActorTimeout([(call.group, call.rank) for call in self.silent], first.method, self.timeout)
        death_errors = (ray.exceptions.RayActorError, ray.exceptions.ActorUnschedulableError)
        died = [f for f in self.failures if isinstance(f[1], death_errors)]
        call, error = (died or self.failures)[0]
        if isinstance(cause := cause_of(error), UserError):
            raise cause from None
        kind = NodeGone if isinstance(error, ray.exceptions.ActorUnschedulableError) else ActorFailed
        others = len(self.failures) - 1
        raise kind(call.group, call.rank, call.method, describe(error), others=others, log=call.log) from error


def settle(
    calls: Sequence[PendingCall],
    timeout: float,
    after_failure: float,
    failed: Callable[[BaseException], None] | None = None,
    waiting_for: Waiting | None = None,
) -> Outcomes:
    """Waits for calls to any number of groups and collects answers and failures instead of raising.

    Args:
        calls: The calls, possibly of several groups.
        timeout: Time limit in seconds.
        after_failure: Seconds to wait for the other calls after the first failure, at most until the time limit.
        failed: Called with the first failure, to notify waiting peers of the failed actor. None calls nothing.
        waiting_for: Receives the names of the actors without an answer, at first and after every answer.

    Returns:
        Answers, failures, and in `silent` the calls without an answer at the end of the wait.
    """
    import ray

    by_ref = {call.ref: call for call in calls}
    outcomes = Outcomes(timeout, {}, [], [])
    waiting = list(by_ref)
    deadline = time.monotonic() + timeout
    while waiting and (remaining := deadline - time.monotonic()) > 0:
        if waiting_for is not None:
            waiting_for([by_ref[ref].actor for ref in waiting])
        done, waiting = ray.wait(waiting, num_returns=1, timeout=remaining)
        for ref in done:
            try:
                outcomes.answers[by_ref[ref]] = ray.get(ref)
            except (ray.exceptions.RayError, UserError) as error:
                if not outcomes.failures:
                    deadline = min(deadline, time.monotonic() + after_failure)
                    if failed is not None:
                        failed(error)
                outcomes.failures.append((by_ref[ref], error))
    outcomes.silent.extend(by_ref[ref] for ref in waiting)
    return outcomes


def gather(calls: Sequence[PendingCall], timeout: float, waiting_for: Waiting | None = None) -> list[Any]:
    """Waits for calls to any number of groups and returns the answers in order. Ends no actor, also after a failure.

    Args:
        calls: The calls.
        timeout: Time limit in seconds. A first failure ends the wait `SETTLE_S` seconds later, if that is earlier.
        waiting_for: Receives the names of the actors without an answer, at first and after every answer.

    Raises:
        UserError: The root cause, if an actor raised a UserError.
        ActorFailed: Any other root cause (`NodeGone` if the actor's node no longer exists). The root cause is the first
            actor death; without any death, the first error.
        ActorTimeout: No call failed, but some actors did not answer within `timeout` seconds.
    """
    outcomes = settle(calls, timeout, SETTLE_S, waiting_for=waiting_for)
    if outcomes.failures or outcomes.silent:
        outcomes.raise_first()
    return [outcomes.answers[call] for call in calls]
