"""Feeding targets: which is next, how a case ended, how long it took."""

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
    """A case took longer than its target's bound. No reader can survive it by accident."""


@dataclass(frozen=True)
class Began:
    """A case is about to be fed."""

    name: str
    number: int


@dataclass(frozen=True)
class Ended:
    """A case is over."""

    name: str
    number: int
    seconds: float
    error: str | None
    """Why it did not end as it may."""


@dataclass
class Share:
    """What one target has had so far."""

    cases: int = 0
    seconds: float = 0.0
    failed: int = 0
    slowest: Ended | None = field(default=None, repr=False)

    def count(self, ended: Ended) -> None:
        """One more case."""
        self.cases, self.seconds = ended.number + 1, self.seconds + ended.seconds
        self.failed += ended.error is not None
        if self.slowest is None or ended.seconds > self.slowest.seconds:
            self.slowest = ended


def case_of(name: str, seed: int, number: int) -> Any:
    """The case that a target's number stands for."""
    return TARGETS[name].make(Random(f"{seed}/{name}/{number}"))


def feed(names: Sequence[str], seed: int, had: Mapping[str, Share]) -> Generator[Began | Ended]:
    """Feeds without end; each time the target that has had the least of its share of the time, so that slow ones
    are not fed less.

    Args:
        names: Targets.
        seed: Decides all cases.
        had: What each has had; whoever takes the events counts it.
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
            prepared.add(name)  # what a first case sets up for good is not left behind
            yield Ended(name, number, time.monotonic() - start, error)


def outcome(name: str, case: Any, watch: Watch | None = None) -> str | None:
    """None where a case ends as it may and leaves nothing behind, else what is wrong."""
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
    except BaseException:  # a library's own kinds too, such as a panic of Rust's
        return traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return None


def _hang(number: int, frame: FrameType | None) -> NoReturn:
    raise Hung("longer than its bound")
