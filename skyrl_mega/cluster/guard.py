"""Ends what a process leaves behind when it dies, however it dies.

    python -I -S guard.py group <pid> <folder>      for an actor: the rest of the process group that it leads, such as
                                                    vLLM's engine core and workers, and its temporary folder
    python -I -S guard.py cluster <pid> <folder>    for a driver: the Ray node that lives in the folder

A process that is killed tells nobody. The guarded one holds the write end of this guard's stdin, so that end of file
means that it is gone or has no need of a guard any more; but what it forked may hold that end too (Megatron forks to
write a checkpoint), and would outlive it, so the process itself is watched as well. Standard library only: it starts in
20 ms.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

TRACKER = b"resource_tracker"
RAY = (b"ray::", b"/ray/core/", b"/ray/_private/", b"/ray/dashboard/")
"""What the command lines of Ray's processes begin with or contain."""
GRACE_S = 3.0


def processes(which: Callable[[Path], bool]) -> list[int]:
    """Processes of this machine whose folder in /proc passes `which`. One that ends while we look does not."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and which(entry):
                found.append(int(entry.name))
    return found


def members(group: int) -> list[int]:
    """Living processes (no zombies) of a process group."""

    def belongs(entry: Path) -> bool:
        state, _, pgrp = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
        return int(pgrp) == group and state != "Z"

    return processes(belongs)


def end_group(group: int) -> None:
    """Kills the group. Python's resource trackers go last: they unlink the shared memory of the others."""
    for pid in members(group):
        with contextlib.suppress(OSError):
            if TRACKER not in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + GRACE_S
    while members(group) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in members(group):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def end_cluster(folder: str, driver: int) -> None:
    """Kills the Ray processes that have files open in the folder, and removes it. Most end by themselves, some do
    not."""

    def belongs(entry: Path) -> bool:
        command = (entry / "cmdline").read_bytes()
        if int(entry.name) in (os.getpid(), driver) or not any(mark in command for mark in RAY):
            return False
        return folder.encode() in command or any(os.readlink(fd).startswith(folder) for fd in (entry / "fd").iterdir())

    deadline = time.monotonic() + GRACE_S
    while (left := processes(belongs)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    shutil.rmtree(folder, ignore_errors=True)


def main(what: str, pid: str, folder: str) -> None:
    """Waits for the end of the guarded process."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Slurm sends it to every process of a job that is cancelled
    if what == "group" and os.fork() > 0:
        os._exit(0)  # Ray's workers kill their children on exit: the guard must not be one
    with contextlib.suppress(ProcessLookupError):  # it is gone already
        select.select([0, os.pidfd_open(int(pid))], [], [])  # nothing is ever written to 0: it is ready at end of file
    if what == "group":
        end_group(int(pid))
        shutil.rmtree(folder, ignore_errors=True)
    else:
        end_cluster(folder, int(pid))


if __name__ == "__main__":
    main(*sys.argv[1:])
