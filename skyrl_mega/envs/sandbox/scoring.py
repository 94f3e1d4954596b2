"""Commands that score: what something else has ended is run again, so that it is no failure of the policy's."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Protocol, TypeVar


class Ended(Protocol):
    """What became of a command: an `Outcome`, or a session's."""

    @property
    def status(self) -> str:
        """How it ended."""

    @property
    def exit(self) -> int | None:
        """Exit code, −N for signal N."""


T = TypeVar("T", bound=Ended)
KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
"""A process, and what a shell says of one that it has started."""
TRIES = 3
PAUSE_S = 1.0
"""Before it is run again, so that those that had the memory end meanwhile."""


def scored(run: Callable[[float], T], seconds: float, most: int = TRIES) -> T:
    """Runs a command; again where it ended for memory that it shares with others, or by a SIGKILL that no limit sent.

    What ends so each time is taken for the command's own doing: else a policy could have its bad answers left out.

    Args:
        run: Runs it for so many seconds at most. It begins again each time.
        seconds: For all tries together.
        most: Tries.
    """
    deadline = time.monotonic() + seconds
    for tries in range(1, most + 1):
        start = time.monotonic()
        outcome = run(max(deadline - start, 0.1))
        again = outcome.status == "memory" or (outcome.status == "failed" and outcome.exit in KILLED)
        if not again or tries == most or 2 * time.monotonic() - start + PAUSE_S > deadline:
            break
        time.sleep(PAUSE_S)
    return outcome
