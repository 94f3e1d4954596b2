"""What a running command holds: disk, by name and without one, and memory. Looked at by the launcher, from outside.

Standard library only. In /proc, since a file that was unlinked has blocks as long as a process has it open or mapped.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

import tree

LOOK_S, LONGEST_S = 0.05, 1.0
"""Between two looks: more where looking takes more than a tenth of a core, up to the longest."""
HIDDEN_S = 2.0
"""So long a command's processes may be out of sight, in all: the first one is between fork and exec, which takes a
while on a busy machine. Those that come later are seen from the start to the end, unless they hide."""
LISTS_CHILDREN = os.path.exists("/proc/thread-self/children")
"""Whether the kernel lists them; else all processes are asked for their parents."""
EXITING = 0x4
"""PF_EXITING of include/linux/sched.h, among a task's flags."""
PAGE = os.sysconf("SC_PAGE_SIZE")


class Watch:
    """Looks at one command, again and again.

    Args:
        folder: Where it may write, when only looking bounds that: no file system of its own is there. Else None.
        most: Bytes of it.
        entries: Files, folders and links of it.
        file: Bytes of its largest file.
        init: The first process inside, which is trusted and hides itself.
        memory: Whether to look at memory too: no cgroup bounds it.
    """

    def __init__(self, folder: str | None, most: int, entries: int, file: int, init: int, memory: bool) -> None:
        self.folder, self.most, self.entries, self.file, self.memory = folder, most, entries, file, memory
        self.init = init
        self.device = os.stat(folder).st_dev if folder is not None else None
        self.pause: float | None = LOOK_S if folder is not None or memory else None
        """Seconds until the next look; None does without."""
        self._hidden_s, self._looked = 0.0, time.monotonic()

    def look(self) -> tuple[str | None, int]:
        """`disk` where there is too much of it, and the bytes of memory that all processes have together."""
        start = time.process_time()
        try:
            tasks = list(_tasks())
            used = _memory({pid for pid, _ in tasks}) if self.memory else 0
            return ("disk" if self.folder is not None and self._too_much(tasks) else None), used
        finally:
            self.pause = min(LONGEST_S, max(LOOK_S, 10 * (time.process_time() - start)))

    def _too_much(self, tasks: list[tuple[int, str]]) -> bool:
        assert self.folder is not None
        size = tree.measure(self.folder, self.most, self.entries)
        if size.deep or size.bytes > self.most or size.entries > self.entries:
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
            except OSError:  # it ended
                continue
        since, self._looked = self._looked, time.monotonic()
        self._hidden_s += (self._looked - since) if hidden else 0.0
        return self._hidden_s > HIDDEN_S or size.bytes + sum(nameless.values()) > self.most

    def _open_files(self, task: str, nameless: dict[int, int]) -> None:
        """Adds the unlinked files that a thread has open: inode → bytes."""
        for name in os.listdir(f"{task}/fd"):
            with contextlib.suppress(FileNotFoundError):
                info = os.stat(f"{task}/fd/{name}")
                if info.st_dev == self.device and info.st_nlink == 0:
                    nameless[info.st_ino] = info.st_blocks * 512

    def _mapped_files(self, task: str, nameless: dict[int, int]) -> None:
        """Adds those that it has mapped and no longer open, whose size nobody tells: the largest that there may be."""
        with open(f"{task}/maps", errors="replace") as maps:
            for line in maps:
                if line.endswith(" (deleted)\n"):
                    _, _, _, device, inode, _ = line.split(maxsplit=5)
                    major, _, minor = device.partition(":")
                    if os.makedev(int(major, 16), int(minor, 16)) == self.device:
                        nameless.setdefault(int(inode), self.file)


def descendants() -> Iterator[int]:
    """Every process that this one started, or that came to it as an orphan, and theirs."""
    pending = [os.getpid()]
    while pending:
        found = _children(pending.pop())
        yield from found
        pending += found


def _children(parent: int) -> list[int]:
    if not LISTS_CHILDREN:
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _parent(pid) == parent]
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{parent}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{parent}/task/{thread}/children") as children:
                found += map(int, children.read().split())
    return found


def _parent(pid: int) -> int | None:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as line:
        return int(line.read().rpartition(")")[2].split()[1])
    return None


def _ended(task: str) -> bool:
    """Whether it ends, or has ended and waits until its parent asks how: it runs no more, and nobody may look at it."""
    with contextlib.suppress(OSError), open(f"{task}/stat") as line:
        state, *fields = line.read().rpartition(")")[2].split()
        return state in "ZX" or bool(int(fields[5]) & EXITING)
    return True


def _tasks() -> Iterator[tuple[int, str]]:
    """Process and folder in /proc of every thread: each may have files that the others have not."""
    for pid in descendants():
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{pid}/task"):
                yield pid, f"/proc/{pid}/task/{thread}"


def _memory(pids: set[int]) -> int:
    """Bytes that they have in memory; what several share counts once, where the kernel says what that is."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/statm") as statm:
            resident = int(statm.read().split()[1]) * PAGE
            try:
                total += _share(pid)
            except OSError:  # out of sight, or ended
                total += resident
    return total


def _share(pid: int) -> int:
    with open(f"/proc/{pid}/smaps_rollup") as rollup:
        return next((int(line.split()[1]) * 1024 for line in rollup if line.startswith("Pss:")), 0)
