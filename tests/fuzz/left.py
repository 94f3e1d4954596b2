"""Leftovers of a case: temporary files, processes, threads, descriptors, shared memory and changes of the driver.

`Watch` makes this process the parent of every orphan below it and sets a private temporary folder, so leftovers of
other programs on the machine do not count.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from skyrl_mega.envs.sandbox import folders

GRACE_S = 3.0
"""Seconds allowed for ending threads and processes under collection."""
SHARED_MEMORY = Path("/dev/shm")
STAY = (b"envs/math/worker.py",)
"""Command lines of pool processes, which stay for the next case."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD, signal.SIGPIPE)
SUBREAPER = 36


@dataclass(frozen=True)
class Seen:
    """The state of the process at one moment."""

    files: frozenset[str]
    processes: frozenset[int]
    threads: frozenset[threading.Thread]
    shared: frozenset[str]
    descriptors: frozenset[int]
    driver: frozenset[str]
    """The driver's folder, environment and similar state, as `name=value`."""


class Watch:
    """A context manager to compare the states before and after a case."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._children = Children()

    def __enter__(self) -> Watch:
        self._root = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="skyrl-fuzz-"))
        os.chmod(self._root, 0o711)
        self._roots = {self._root, tempfile.gettempdir()}
        before = tempfile.tempdir
        tempfile.tempdir = self._root
        self._stack.callback(setattr, tempfile, "tempdir", before)
        prctl = ctypes.CDLL(None).prctl
        prctl(SUBREAPER, 1, 0, 0, 0)
        self._stack.callback(prctl, SUBREAPER, 0, 0, 0, 0)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def seen(self) -> Seen:
        """Returns the current state."""
        return Seen(
            frozenset(self._files()),
            self._children.now(),
            frozenset(threading.enumerate()),
            frozenset(os.listdir(SHARED_MEMORY)) if SHARED_MEMORY.is_dir() else frozenset(),
            frozenset(map(int, os.listdir("/proc/self/fd"))),
            frozenset(_driver()),
        )

    def left(self, before: Seen) -> str:
        """Returns a description of everything added since `before` and still present after a grace period, else ""."""
        deadline, lasting = (
            time.monotonic() + GRACE_S,
            [set(os.listdir(SHARED_MEMORY))] if SHARED_MEMORY.is_dir() else [],
        )
        while lines := self._more(before, lasting):
            if time.monotonic() > deadline:
                return "; ".join(lines)
            gc.collect()
            time.sleep(0.02)
            self._children = Children()  # drops processes ended meanwhile
        return ""

    def _more(self, before: Seen, lasting: list[set[str]]) -> list[str]:
        """Returns everything added since `before`. `lasting`: shared memory present in every look so far."""
        now, lines = self.seen(), []
        for field in fields(Seen):
            more = getattr(now, field.name) - getattr(before, field.name)
            if field.name == "shared":
                more = {name for name in more & lasting[-1] if not _held(SHARED_MEMORY / name)} if lasting else set()
                lasting.append(more)
            if field.name == "descriptors" and len(now.descriptors) <= len(before.descriptors):
                continue  # a descriptor was replaced
            if more:
                lines.append(f"{field.name}: {', '.join(_shown(field.name, one) for one in more)[:500]}")
        return lines

    def _files(self) -> Iterator[str]:
        """Yields the files below the temporary folder and in all sandbox folders of this process."""
        prefix = f"{folders.PREFIX}{folders.owner()}-"
        for root in self._roots:
            for name in os.listdir(root):
                if name.startswith(prefix):
                    yield from (f"{name}/{inner}" for inner in os.listdir(os.path.join(root, name)) if inner != "lock")
                elif root == self._root:
                    yield name


class Children:
    """The processes below this process, adopted orphans included, permanent pool processes excluded."""

    def __init__(self) -> None:
        self._newest, self._known = "", frozenset[int]()

    def now(self) -> frozenset[int]:
        """Returns the process ids. Looks again only if a process started since the last call."""
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return frozenset()
        newest = Path("/proc/loadavg").read_text().split()[-1]
        if newest != self._newest:
            self._newest, self._known = newest, frozenset(_children())
        return self._known


def _children() -> Iterator[int]:
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and not _stays(pid):
                yield int(pid)


def _stays(pid: str) -> bool:
    command = Path(f"/proc/{pid}/cmdline").read_bytes()
    return any(name in command for name in STAY)


def _driver() -> Iterator[str]:
    yield f"folder={os.getcwd()}"
    yield from (f"{name}={value}" for name, value in os.environ.items())
    yield from (f"signal {number}={signal.getsignal(number)}" for number in SIGNALS)
    yield f"recursion={sys.getrecursionlimit()}"
    yield f"digits={sys.get_int_max_str_digits()}"
    yield f"path={sys.path}"


def _shown(kind: str, one: object) -> str:
    with contextlib.suppress(OSError):
        if kind == "processes":
            return f"{one} {Path(f'/proc/{one}/cmdline').read_bytes()[:200]!r}"
        if kind == "descriptors":
            return f"{one} {os.readlink(f'/proc/self/fd/{one}')}"
    return str(one)


def _held(file: Path) -> bool:
    """Returns True if any process has a file of shared memory open or mapped: the file belongs to another program."""
    try:
        inode = file.stat().st_ino
    except FileNotFoundError:
        return True  # its owner removed it meanwhile
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            mapped = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
            if any(str(SHARED_MEMORY) in line and line.split()[4] == str(inode) for line in mapped):
                return True
            for fd in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if str(SHARED_MEMORY) in os.readlink(fd) and fd.stat().st_ino == inode:
                        return True
    return False
