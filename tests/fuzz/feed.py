"""Feeding of targets: choice of the next target, outcome and time of each case."""

from __future__ import annotations

import signal
import tempfile
import time
import traceback
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any, NoReturn

from tests.fuzz.left import Watch
from tests.fuzz.target import one_line
from tests.fuzz.targets import TARGETS


class Hung(BaseException):
    """A case exceeded the target's time limit. A BaseException, so no reader catches it by accident."""


@dataclass(frozen=True)
class Began:
    """The start of a case."""

    name: str
    number: int


@dataclass(frozen=True)
class Ended:
    """The end of a case."""

    name: str
    number: int
    seconds: float
    error: str | None
    """The reason of a failure, or None."""


@dataclass
class Share:
    """The cases and seconds of a target."""

    cases: int = 0
    seconds: float = 0.0
    failed: int = 0
    slowest: Ended | None = field(default=None, repr=False)

    def count(self, ended: Ended) -> None:
        """Counts one more case."""
        self.cases, self.seconds = ended.number + 1, self.seconds + ended.seconds
        self.failed += ended.error is not None
        if self.slowest is None or ended.seconds > self.slowest.seconds:
            self.slowest = ended


def case_of(name: str, seed: int, number: int) -> Any:
    """Returns the case with this number of a target."""
    return TARGETS[name].make(Random(f"{seed}/{name}/{number}"))


def feed(names: Sequence[str], seed: int, had: Mapping[str, Share]) -> Generator[Began | Ended]:
    """Feeds without end. The next target is the target with the smallest fraction of its share of time.

    Slow targets therefore get as much time as fast targets.

    Args:
        names: Targets.
        seed: Seed of all cases.
        had: The shares of the targets, updated by the consumer of the events.
    """
    with Watch() as watch:
        prepared = set[str]()
        while True:
            name = min(names, key=lambda name: had[name].seconds / TARGETS[name].share)
            number = had[name].cases
            if name not in prepared:
                TARGETS[name].prepare()
            yield Began(name, number)
            start = time.monotonic()
            error = outcome(name, case_of(name, seed, number), watch if name in prepared else None)
            prepared.add(name)  # permanent set-up of the first case does not count as left behind
            yield Ended(name, number, time.monotonic() - start, error)


def outcome(name: str, case: Any, watch: Watch | None = None) -> str | None:
    """Returns None if a case ends as allowed and leaves nothing behind, else a description of the fault."""
    seen = watch.seen() if watch else None
    error = _outcome(name, case)
    if error is None and watch is not None and seen is not None and (left := watch.left(seen)):
        return f"left behind: {left}\n"
    return error


def _outcome(name: str, case: Any) -> str | None:
    target = TARGETS[name]
    before = signal.signal(signal.SIGALRM, _hang)
    signal.setitimer(signal.ITIMER_REAL, target.bound_s)
    try:
        with tempfile.TemporaryDirectory() as folder:
            target.run(case, Path(folder))
    except target.errors as error:
        try:
            one_line(error)
        except AssertionError:
            return traceback.format_exc()
    except KeyboardInterrupt:
        raise
    except BaseException:  # includes exceptions of libraries outside Exception, such as a Rust panic
        return traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return None


def _hang(number: int, frame: FrameType | None) -> NoReturn:
    raise Hung("longer than its bound")
