"""Detection of faults by the fuzzing: each faulty target fails in its own way, and other targets continue."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterable
from typing import Any

import pytest

from tests.fuzz.apart import feed_apart
from tests.fuzz.feed import Began, Ended, Share, feed
from tests.fuzz.judged import case_of, play
from tests.fuzz.target import Target
from tests.fuzz.targets import TARGETS

kept: list[Any] = []


class Refused(Exception):
    """An error allowed to the target."""


def wrong_reward() -> None:
    play("gsm8k", case_of("5", [[["#### 5", 1]]], 0.0, 0.0, 1.0))


def raises() -> None:
    raise ValueError("x")


def refuses_in_two_lines() -> None:
    raise Refused("a\nb")


def hangs() -> None:
    time.sleep(60)


def leaves_a_file() -> None:
    kept.append(tempfile.mkstemp())


def leaves_a_descriptor() -> None:
    kept.append(os.open("/dev/null", os.O_RDONLY))


def leaves_a_thread() -> None:
    threading.Thread(target=time.sleep, args=(15,), daemon=True).start()


def leaves_a_daemon() -> None:
    subprocess.run(["/bin/sh", "-c", "setsid sleep 15 > /dev/null 2>&1 &"], check=True)


def changes_the_environment() -> None:
    os.environ["FUZZ_LEFT"] = str(len(kept))
    kept.append(1)


def ends_the_process() -> None:
    os._exit(7)


def hangs_and_hears_nothing() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    time.sleep(60)


NOTICED: dict[Callable[[], None], str] = {
    wrong_reward: "earned 1.0 and not 0.0",
    raises: "ValueError: x",
    refuses_in_two_lines: "Refused: a\nb",
    hangs: "Hung: longer than its bound",
    leaves_a_file: "left behind: files: tmp",
    leaves_a_descriptor: "left behind: descriptors: ",
    leaves_a_thread: "left behind: threads: ",
    leaves_a_daemon: "left behind: processes: ",
    changes_the_environment: "left behind: driver: FUZZ_LEFT=",
}
HANG = (hangs, hangs_and_hears_nothing)
KILLED = {ends_the_process: "it ended the process, with exit code 7", hangs_and_hears_nothing: "no signal reaches it"}


def errors(
    acts: Iterable[Callable[[], None]],
    source: Callable[..., Generator[Began | Ended]],
    monkeypatch: pytest.MonkeyPatch,
) -> dict[str, str | None]:
    """Feeds a target per act and a faultless target; returns the error of the last case of each by name."""
    for act in (*acts, time.monotonic):
        target = Target(
            lambda random: 1, lambda case, folder, act=act: act(), (Refused,), bound_s=0.5 if act in HANG else 20.0
        )
        monkeypatch.setitem(TARGETS, act.__name__, target)
    names = [act.__name__ for act in (*acts, time.monotonic)]
    shares, error_by_target = {name: Share() for name in names}, dict[str, str | None]()
    with contextlib.closing(source(names, 1, shares)) as events:
        for event in events:
            if isinstance(event, Ended):
                shares[event.name].count(event)
                error_by_target[event.name] = event.error
            if all(share.cases >= 2 for share in shares.values()):
                return error_by_target
    raise AssertionError


def test_what_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.fuzz.left.GRACE_S", 0.2)
    gc.collect()  # descriptors dropped by other tests must not be closed meanwhile: their number would not rise
    error_by_target = errors(NOTICED, feed, monkeypatch)
    monkeypatch.delenv("FUZZ_LEFT")
    assert error_by_target.pop("monotonic") is None
    for act, what in NOTICED.items():
        assert what in (error_by_target[act.__name__] or ""), act.__name__


def test_a_process_that_dies_or_hangs_is_one_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.fuzz.apart.PATIENCE_S", 0.5)
    error_by_target = errors(KILLED, feed_apart, monkeypatch)
    assert error_by_target.pop("monotonic") is None
    for act, what in KILLED.items():
        assert what in (error_by_target[act.__name__] or ""), act.__name__
