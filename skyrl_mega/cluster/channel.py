"""Communication between supervisor and driver, through memory shared since the fork.

The supervisor asks the driver to end. The driver reports if it polls for such requests, the files and folders to remove
after its death, the current step and environments, and the exit code. No call here blocks, writes to a disk, or
interrupts another call. In a process without a supervisor there are no requests, and reports are dropped.
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

_REQUEST, _POLLING, _SIGNAL, _FINISHED = 0, 1, 2, 3
"""Offsets of single bytes in the shared memory."""
_STEP, _ENVIRONMENTS = slice(8, 16), slice(16, 1040)
"""Ranges in the shared memory: a number, and a text padded with NUL."""


class StopRequest(IntEnum):
    """The supervisor's request to the driver."""

    NOTHING = 0
    SOON = 1
    """End as soon as no work is lost."""
    NOW = 2
    """End at once; the supervisor kills the driver a few seconds later."""


class Channel:
    """Shared memory of a supervisor and a driver. Created before the fork."""

    def __init__(self) -> None:
        self._flags = mmap.mmap(-1, mmap.PAGESIZE)
        self._paths = os.memfd_create("paths")

    @property
    def asked(self) -> StopRequest:
        """The supervisor's current request."""
        return StopRequest(self._flags[_REQUEST])

    def ask(self, what: StopRequest, number: signal.Signals) -> None:
        """Sends a request to the driver, in place of an earlier request. Does not wait for an effect.

        Args:
            what: The request.
            number: The received signal behind the request.
        """
        self._flags[_SIGNAL] = number
        self._flags[_REQUEST] = what

    @property
    def signal(self) -> str:
        """Name of the signal behind the latest request, such as SIGTERM; "" before the first."""
        number = self._flags[_SIGNAL]
        return signal.Signals(number).name if number else ""

    @property
    def polled(self) -> bool:
        """True while the driver polls for requests (`set_polled`). A driver without polling is killed on a signal."""
        return bool(self._flags[_POLLING])

    def set_polled(self, polling: bool) -> None:
        """Reports to the supervisor that the driver starts (`polling=True`) or stops (False) polling for requests."""
        self._flags[_POLLING] = polling

    @property
    def exit_code(self) -> int | None:
        """Exit code reported by the driver with `finish`; None without a report, as from a driver that crashed or was
        killed. The driver's process may run for a moment after the report."""
        return self._flags[_FINISHED] - 1 if self._flags[_FINISHED] else None

    def finish(self, code: int) -> None:
        """Reports that the driver has finished with this exit code."""
        self._flags[_FINISHED] = code + 1

    def at_step(self, number: int) -> None:
        """Tells the supervisor the driver's current step, for the message about a driver that dies."""
        self._flags[_STEP] = number.to_bytes(8, "little")

    def set_environments(self, environments: str) -> None:
        """Reports the names of the environments that the driver runs, as text cut to 1,024 bytes, for the message about
        a driver that dies."""
        size = _ENVIRONMENTS.stop - _ENVIRONMENTS.start
        self._flags[_ENVIRONMENTS] = environments.encode(errors="replace")[:size].ljust(size, b"\0")

    def doing(self) -> str:
        """Returns what the driver reported last, as the end of a sentence: ", in step 3, while it ran environment
        math"; without what was not reported."""
        step = int.from_bytes(self._flags[_STEP], "little")
        environments = self._flags[_ENVIRONMENTS].rstrip(b"\0").decode(errors="replace")
        running = f", while it ran environment {environments}" if environments else ""
        return (f", in step {step}" if step else "") + running

    def record_path(self, sign: str, path: Path) -> None:
        """Records a path: sign `+` before the driver creates the path, `-` after its removal or when the path
        may stay."""
        os.write(self._paths, os.fsencode(f"{sign}{path.absolute()}\0"))

    def unremoved_paths(self) -> list[Path]:
        """Returns the recorded paths that the driver has not recorded as removed (`record_path`), in order."""
        notes = os.fsdecode(os.pread(self._paths, os.fstat(self._paths).st_size, 0)).split("\0")[:-1]
        existing: dict[str, None] = {}
        for note in notes:
            if note[0] == "+":
                existing[note[1:]] = None
            else:
                existing.pop(note[1:], None)
        return [Path(path) for path in existing]


_channel: Channel | None = None
"""Channel of this process, a driver; None in any other process."""
_running: Counter[str] = Counter()
"""Running environment calls of this process, by environment."""
_running_lock = threading.Lock()


def join(channel: Channel) -> None:
    """Sets the channel that this process, a driver, uses in all functions of this module."""
    global _channel
    _channel = channel


def asked() -> StopRequest:
    """Returns the supervisor's current request to this process; NOTHING without a supervisor."""
    return StopRequest.NOTHING if _channel is None else _channel.asked


def stop_signal() -> str:
    """Returns the name of the signal behind the request `asked`; "" without a request or without a supervisor."""
    return "" if _channel is None else _channel.signal


def finish(code: int) -> None:
    """Reports to the supervisor that this process has finished its work and ends with this exit code, but does not end
    the process. Without this report the supervisor treats the end as a fault. Does nothing without a supervisor."""
    if _channel is not None:
        _channel.finish(code)


def at_step(number: int) -> None:
    """Reports the step that this process works on to the supervisor, for the message about a crash. Does nothing in a
    process without a supervisor."""
    if _channel is not None:
        _channel.at_step(number)


@contextmanager
def running_environment(environment: str) -> Iterator[None]:
    """Reports to the supervisor that this process runs code of an environment inside the `with` block, for the message
    about a crash. Does nothing in a process without a supervisor."""
    _count(environment, 1)
    try:
        yield
    finally:
        _count(environment, -1)


def _count(environment: str, change: int) -> None:
    if _channel is None:
        return
    with _running_lock:
        before = _running[environment]
        _running[environment] += change
        if not (before and _running[environment]):
            _channel.set_environments(", ".join(sorted(+_running)))


@contextmanager
def polling_for_stop() -> Iterator[None]:
    """Tells the supervisor that this process polls for requests (`asked`) inside the block. Does nothing in a process
    without a supervisor."""
    if _channel is None:
        yield
        return
    _channel.set_polled(True)
    try:
        yield
    finally:
        _channel.set_polled(False)


@contextmanager
def removed_after_crash(path: Path) -> Iterator[None]:
    """Makes the supervisor remove the file or folder if this process dies inside the block. After the block, also after
    an error, the path is left as it is. Does nothing in a process without a supervisor."""
    if _channel is not None:
        _channel.record_path("+", path)
    try:
        yield
    finally:
        if _channel is not None:
            _channel.record_path("-", path)
