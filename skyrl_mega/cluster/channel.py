"""What a supervisor and its driver tell each other, through memory that both have since the fork.

The supervisor asks the driver to end; the driver says whether it looks for that, which files and folders must not
outlast it, what it is doing, and that it has finished. Nothing here blocks, writes to a disk, or interrupts a call. In
a process without a supervisor nobody asks, and what is said goes nowhere.
"""

from __future__ import annotations

import mmap
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path

_ASKED, _HEEDED, _SIGNAL, _FINISHED = 0, 1, 2, 3
"""Bytes in the shared memory."""
_STEP, _PLAYING = slice(8, 16), slice(16, 1040)
"""Ranges in the shared memory: a number, and a text that is filled up with NUL."""


class Asked(IntEnum):
    """What the driver is asked."""

    NOTHING = 0
    SOON = 1
    """To end as soon as nothing is lost."""
    NOW = 2
    """To end at once; what it does not do within seconds is done by killing it."""


class Channel:
    """One supervisor's and its driver's. Made before the fork."""

    def __init__(self) -> None:
        self._flags = mmap.mmap(-1, mmap.PAGESIZE)
        self._paths = os.memfd_create("paths")

    @property
    def asked(self) -> Asked:
        """What the driver is asked by now."""
        return Asked(self._flags[_ASKED])

    def ask(self, what: Asked, number: signal.Signals) -> None:
        """Asks the driver, for a signal that has come."""
        self._flags[_SIGNAL] = number
        self._flags[_ASKED] = what

    @property
    def signal(self) -> str:
        """The newest one's name; nothing before the first."""
        number = self._flags[_SIGNAL]
        return signal.Signals(number).name if number else ""

    @property
    def heeded(self) -> bool:
        """Whether the driver looks for it at present."""
        return bool(self._flags[_HEEDED])

    def heed(self, heeded: bool) -> None:
        """The driver looks for it from now on, or no longer."""
        self._flags[_HEEDED] = heeded

    @property
    def finished(self) -> int | None:
        """Exit code with which the driver has finished; None before that."""
        return self._flags[_FINISHED] - 1 if self._flags[_FINISHED] else None

    def finish(self, code: int) -> None:
        """Says that the driver has finished with this exit code."""
        self._flags[_FINISHED] = code + 1

    def at_step(self, number: int) -> None:
        """Says which step the driver is in."""
        self._flags[_STEP] = number.to_bytes(8, "little")

    def playing(self, environments: str) -> None:
        """Says which environments the driver is running."""
        size = _PLAYING.stop - _PLAYING.start
        self._flags[_PLAYING] = environments.encode(errors="replace")[:size].ljust(size, b"\0")

    def doing(self) -> str:
        """Returns the step and the environments that the driver was running, in words; "" where there are none."""
        step = int.from_bytes(self._flags[_STEP], "little")
        environments = self._flags[_PLAYING].rstrip(b"\0").decode(errors="replace")
        running = f", while it ran environment {environments}" if environments else ""
        return (f", in step {step}" if step else "") + running

    def note(self, sign: str, path: Path) -> None:
        """`+`: the driver is about to make this; `-`: it is gone, or may stay."""
        os.write(self._paths, os.fsencode(f"{sign}{path.absolute()}\0"))

    def left(self) -> list[Path]:
        """What the driver has made and not removed."""
        notes = os.fsdecode(os.pread(self._paths, os.fstat(self._paths).st_size, 0)).split("\0")[:-1]
        there: dict[str, None] = {}
        for note in notes:
            if note[0] == "+":
                there[note[1:]] = None
            else:
                there.pop(note[1:], None)
        return [Path(path) for path in there]


_own: Channel | None = None
"""This process's, where it is a driver."""
_running: Counter[str] = Counter()
"""Calls of environments that are under way in this process, by environment."""
_running_lock = threading.Lock()


def join(channel: Channel) -> None:
    """Makes it this process's."""
    global _own
    _own = channel


def asked() -> Asked:
    """What this process is asked by now."""
    return Asked.NOTHING if _own is None else _own.asked


def signalled() -> str:
    """The signal for which this process is `asked`; nothing where it is not."""
    return "" if _own is None else _own.signal


def finish(code: int) -> None:
    """Says that this process has finished, and with which exit code: that alone ends a command as done."""
    if _own is not None:
        _own.finish(code)


def at_step(number: int) -> None:
    """Says which step this process is in, for the line that tells of its end."""
    if _own is not None:
        _own.at_step(number)


@contextmanager
def playing(environment: str) -> Iterator[None]:
    """Says that this process runs code of an environment, inside the block."""
    _count(environment, 1)
    try:
        yield
    finally:
        _count(environment, -1)


def _count(environment: str, change: int) -> None:
    if _own is None:
        return
    with _running_lock:
        before = _running[environment]
        _running[environment] += change
        if not (before and _running[environment]):
            _own.playing(", ".join(sorted(+_running)))


@contextmanager
def heeding() -> Iterator[None]:
    """Says that this process looks for what it is `asked`, inside the block."""
    if _own is None:
        yield
        return
    _own.heed(True)
    try:
        yield
    finally:
        _own.heed(False)


@contextmanager
def removed_at_the_end(path: Path) -> Iterator[None]:
    """Should this process not live to see the end of the block, its supervisor removes the file or folder."""
    if _own is not None:
        _own.note("+", path)
    try:
        yield
    finally:
        if _own is not None:
            _own.note("-", path)
