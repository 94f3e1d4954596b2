"""Ends what a process leaves behind when it dies, however it dies.

    python -I -S reaper.py group <pid> <folder>      for an actor: the rest of the process group that it leads, such as
                                                    vLLM's engine core and workers, their shared memory, which vLLM
                                                    leaves behind when it is killed, and its temporary folder
    python -I -S reaper.py cluster <pid> <folder>    for a driver: the Ray node that lives in the folder

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

SHARED = "/dev/shm/"
LOOK_EVERY_S = 3.0
"""How often a guard notes what its group has in shared memory: when the group ends, who had it mapped may be gone."""
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


def numbers() -> set[int]:
    """Of the files in /dev/shm. What is there before a command starts is somebody else's."""
    try:
        with os.scandir(SHARED) as entries:
            return {entry.inode() for entry in entries}
    except OSError:  # a machine without it
        return set()


def shared_memory(pids: list[int]) -> set[str]:
    """Files in /dev/shm that these processes have mapped, by number: a semaphore is mapped before it has its name."""
    if not os.path.isdir(SHARED):
        return set()
    device = os.stat(SHARED).st_dev
    there, mapped = f"{os.major(device):02x}:{os.minor(device):02x}", set()
    for pid in pids:
        with contextlib.suppress(OSError):
            words = [line.split(maxsplit=5) for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
            mapped |= {int(w[4]) for w in words if w[3] == there}
    with os.scandir(SHARED) as entries:
        return {entry.path for entry in entries if entry.inode() in mapped}


def end_group(group: int) -> None:
    """Kills the group; returns when it is gone."""
    deadline = time.monotonic() + GRACE_S
    while (left := members(group)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def unlink(names: set[str], others: set[int]) -> None:
    """Removes shared memory that nobody has mapped any more.

    Args:
        names: What to remove.
        others: `numbers` of what stays.
    """
    for name in names - shared_memory(processes(lambda entry: True)):
        with contextlib.suppress(OSError):  # whoever made it removed it, or it never had a name for long
            if os.stat(name).st_ino not in others:
                os.unlink(name)


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
    group = what == "group"
    if group and os.fork() > 0:
        os._exit(0)  # Ray's workers kill their children on exit: the guard must not be one
    segments: set[str] = set()
    others = numbers()
    with contextlib.suppress(ProcessLookupError):  # it is gone already
        ends = [0, os.pidfd_open(int(pid))]  # nothing is ever written to 0: it is ready at end of file
        while not select.select(ends, [], [], LOOK_EVERY_S if group else None)[0]:
            segments |= shared_memory(members(int(pid)))
    if group:
        segments |= shared_memory(members(int(pid)))
        end_group(int(pid))
        unlink(segments, others)
        shutil.rmtree(folder, ignore_errors=True)
    else:
        end_cluster(folder, int(pid))


if __name__ == "__main__":
    main(*sys.argv[1:])
