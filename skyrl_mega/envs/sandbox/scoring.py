"""Retries of scoring commands that an outside cause has ended, so that the policy is not blamed for the end."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from skyrl_mega.envs.waiting import working_clock


class EndedCommand(Protocol):
    """Protocol of a command's result: a `SandboxResult`, or a session's `CommandResult`."""

    @property
    def status(self) -> str:
        """Status of the command, as in `SandboxResult`."""

    @property
    def exit(self) -> int | None:
        """Exit code, −N for signal N; None if unknown."""


T = TypeVar("T", bound=EndedCommand)
RETRIED = ("memory", "lost")
"""Statuses of a command that ended for memory shared with other commands, or whose machine was lost."""
KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
"""Exit codes of a killed process, and of a shell whose child was killed."""
TRIES = 3
"""Default maximum number of tries."""
PAUSE_S = 1.0
"""Seconds before a retry, so that the commands that hold the memory can end."""


def run_with_retries(run: Callable[[float], T], seconds: float, max_tries: int = TRIES) -> T:
    """Runs a command and returns the result of the last try. Retries if the command ended for memory shared with other
    commands, by the loss of its machine, or by a SIGKILL that no limit sent, and the time left suffices for a try as
    long as the last. Errors of `run` are raised unchanged.

    A command that ends so on every try is at fault itself: otherwise a policy could have bad answers discarded.

    Args:
        run: Runs the command from the start, within the given number of seconds.
        seconds: Time limit for all tries together, without the time waited for shared resources.
        max_tries: Maximum number of tries.
    """
    deadline = working_clock() + seconds
    for tries in range(1, max_tries + 1):
        start = working_clock()
        outcome = run(max(deadline - start, 0.1))
        retry = outcome.status in RETRIED or (outcome.status == "failed" and outcome.exit in KILLED)
        if not retry or tries == max_tries or 2 * working_clock() - start + PAUSE_S > deadline:
            break
        time.sleep(PAUSE_S)
    return outcome
