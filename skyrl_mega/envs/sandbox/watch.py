"""Disk and memory use of a running command, unlinked files included. Measured by the launcher, from outside.

Standard library only. Reads /proc, since an unlinked file occupies blocks as long as a process keeps the file open or
mapped.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

import tree

LOOK_S, LONGEST_S = 0.05, 1.0
"""Minimum and maximum seconds between two measurements; the pause grows if measuring takes over a tenth of a core."""
HIDDEN_S = 2.0
"""Total seconds that a command's processes may be invisible. The first process is invisible between fork and exec,
which takes a while on a busy machine. Later processes are visible from start to end, unless hiding.
"""
LISTS_CHILDREN = os.path.exists("/proc/thread-self/children")
"""True if the kernel lists children; otherwise the parents of all processes are read."""
EXITING = 0x4
"""PF_EXITING of include/linux/sched.h, a flag of a task."""
PAGE = os.sysconf("SC_PAGE_SIZE")


class Watch:
    """Repeated measurement of a command.

    Args:
        folder: Writable folder that is bounded only by watching, without a separate file system; else None.
        max_bytes: Maximum bytes in the folder.
        entries: Maximum number of files, folders and links in the folder.
        file: Maximum bytes of a single file.
        init: Process id of the first process inside. Trusted: its open files are not measured.
        memory: True to measure memory too; needed if no cgroup bounds the memory.
    """

    def __init__(self, folder: str | None, max_bytes: int, entries: int, file: int, init: int, memory: bool) -> None:
        self.folder, self.max_bytes, self.entries, self.file, self.memory = folder, max_bytes, entries, file, memory
        self.init = init
        self.device = os.stat(folder).st_dev if folder is not None else None
        self.pause_s: float | None = LOOK_S if folder is not None or memory else None
        """Seconds until the next measurement; None for no measurement."""
        self._hidden_s, self._looked = 0.0, time.monotonic()

    def look(self) -> tuple[str | None, int]:
        """Measures now, and sets `pause_s`. Returns `disk` or None, and the bytes of memory.

        `disk`: `folder` exceeds a limit, or processes hide their files. The memory is the sum over all processes, 0
        unless `memory` is set; the caller compares with a limit.
        """
        start = time.process_time()
        try:
            tasks = list(_tasks())
            used = _memory({pid for pid, _ in tasks}) if self.memory else 0
            return ("disk" if self.folder is not None and self._too_much(tasks) else None), used
        finally:
            self.pause_s = min(LONGEST_S, max(LOOK_S, 10 * (time.process_time() - start)))

    def _too_much(self, tasks: list[tuple[int, str]]) -> bool:
        assert self.folder is not None
        size = tree.measure(self.folder, self.max_bytes, self.entries)
        if size.deep or size.bytes > self.max_bytes or size.entries > self.entries:
            return True
        nameless: dict[int, int] = {}
        hidden = False
        for pid, task in tasks:
            if pid == self.init:
                continue
            try:
                self._open_files(task, nameless)
                self._mapped_files(task, nameless)
            except PermissionError:
                hidden = hidden or not _ended(task)
            except OSError:  # the thread ended
                continue
        since, self._looked = self._looked, time.monotonic()
        self._hidden_s += (self._looked - since) if hidden else 0.0
        return self._hidden_s > HIDDEN_S or size.bytes + sum(nameless.values()) > self.max_bytes

    def _open_files(self, task: str, nameless: dict[int, int]) -> None:
        """Adds the unlinked files opened by a thread to `nameless`: inode → bytes."""
        for name in os.listdir(f"{task}/fd"):
            with contextlib.suppress(FileNotFoundError):
                info = os.stat(f"{task}/fd/{name}")
                if info.st_dev == self.device and info.st_nlink == 0:
                    nameless[info.st_ino] = info.st_blocks * 512

    def _mapped_files(self, task: str, nameless: dict[int, int]) -> None:
        """Adds unlinked files that a thread maps but no longer holds open. The size is unknown, so the largest possible
        size counts.
        """
        with open(f"{task}/maps", errors="replace") as maps:
            for line in maps:
                if line.endswith(" (deleted)\n"):
                    _, _, _, device, inode, _ = line.split(maxsplit=5)
                    major, _, minor = device.partition(":")
                    if os.makedev(int(major, 16), int(minor, 16)) == self.device:
                        nameless.setdefault(int(inode), self.file)


def descendants() -> Iterator[int]:
    """Yields the process IDs of all descendants of this process, adopted orphans included."""
    pending = [os.getpid()]
    while pending:
        children = _children(pending.pop())
        yield from children
        pending += children


def _children(parent: int) -> list[int]:
    if not LISTS_CHILDREN:
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _parent(pid) == parent]
    pids: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{parent}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{parent}/task/{thread}/children") as stream:
                pids += map(int, stream.read().split())
    return pids


def _parent(pid: int) -> int | None:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as line:
        return int(line.read().rpartition(")")[2].split()[1])
    return None


def _ended(task: str) -> bool:
    """Returns True if a thread is exiting or a zombie: such a thread runs no code, and its files are unreadable."""
    with contextlib.suppress(OSError), open(f"{task}/stat") as line:
        state, *fields = line.read().rpartition(")")[2].split()
        return state in "ZX" or bool(int(fields[5]) & EXITING)
    return True


def _tasks() -> Iterator[tuple[int, str]]:
    """Yields the process ID and the /proc folder of every thread, since threads may hold different files."""
    for pid in descendants():
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{pid}/task"):
                yield pid, f"/proc/{pid}/task/{thread}"


def _memory(pids: set[int]) -> int:
    """Returns the memory of processes in bytes; shared memory counts once if the kernel reports shares."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/statm") as statm:
            resident = int(statm.read().split()[1]) * PAGE
            try:
                total += _share(pid)
            except OSError:  # invisible, or ended
                total += resident
    return total


def _share(pid: int) -> int:
    with open(f"/proc/{pid}/smaps_rollup") as rollup:
        return next((int(line.split()[1]) * 1024 for line in rollup if line.startswith("Pss:")), 0)
