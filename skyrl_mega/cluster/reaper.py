"""A guard process: cleans up after another process, whatever the cause of death.

    python -I -S reaper.py group <pid> <folder>      for an actor: the rest of its process group, such as vLLM's
                                                    engine core and workers, shared memory left behind by a killed
                                                    vLLM, and the temporary folder
    python -I -S reaper.py cluster <pid> <folder>    for a driver: the Ray node that uses the folder

A killed process cannot notify anyone. The guarded process holds the write end of the guard's stdin, so end of file
means that the process is gone or needs no guard any more. A forked child may also hold this end and outlive the process
(Megatron forks to write a checkpoint), so the guard watches the process itself as well. Uses the standard library only,
to start in 20 ms.
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
"""Seconds between listings of the group's shared memory: when the group ends, the process with the mapping
may be gone."""
RAY = (b"ray::", b"/ray/core/", b"/ray/_private/", b"/ray/dashboard/")
"""Byte strings found in the command lines of Ray's processes."""
GRACE_S = 3.0
"""Seconds until killed processes must be gone."""


def processes(condition: Callable[[Path], bool]) -> list[int]:
    """Returns the ids of this machine's processes for whose folder in /proc `condition` returns True; skips processes
    that end meanwhile or belong to other users and cannot be read."""
    pids = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and condition(entry):
                pids.append(int(entry.name))
    return pids


def members(group: int) -> list[int]:
    """Returns the ids of the living processes (no zombies) in the process group with this id."""

    def belongs(entry: Path) -> bool:
        state, _, pgrp = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
        return int(pgrp) == group and state != "Z"

    return processes(belongs)


def shared_memory_inodes() -> set[int]:
    """Returns the inode numbers of all files in /dev/shm; an empty set if there is no /dev/shm.

    A caller notes the numbers before starting a command: these files belong to other programs and must not be deleted.
    """
    try:
        with os.scandir(SHARED) as entries:
            return {entry.inode() for entry in entries}
    except OSError:  # a machine without it
        return set()


def shared_memory(pids: list[int]) -> set[str]:
    """Returns the paths of the files in /dev/shm that are mapped by the processes with these ids.

    Files are compared by inode number, because a program maps a new semaphore before the file gets its final name.
    """
    if not os.path.isdir(SHARED):
        return set()
    device = os.stat(SHARED).st_dev
    shm_device, mapped = f"{os.major(device):02x}:{os.minor(device):02x}", set()
    for pid in pids:
        with contextlib.suppress(OSError):
            words = [line.split(maxsplit=5) for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
            mapped |= {int(w[4]) for w in words if w[3] == shm_device}
    with os.scandir(SHARED) as entries:
        return {entry.path for entry in entries if entry.inode() in mapped}


def end_group(group: int) -> None:
    """Kills all processes of a process group with SIGKILL; returns when the group is gone, or after `GRACE_S`
    seconds."""
    _kill_all(lambda: members(group))


def _kill_all(find: Callable[[], list[int]]) -> None:
    deadline = time.monotonic() + GRACE_S
    while (alive := find()) and time.monotonic() < deadline:
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def unlink(names: set[str], kept: set[int]) -> None:
    """Removes files of shared memory that no process of this machine maps any more.

    Args:
        names: Paths of the files, as from `shared_memory`; missing files are no error.
        kept: Inode numbers (`numbers`) of files to keep.
    """
    for name in names - shared_memory(processes(lambda entry: True)):
        with contextlib.suppress(OSError):  # its owner removed it, or its name was short-lived
            if os.stat(name).st_ino not in kept:
                os.unlink(name)


def end_cluster(folder: str, driver: int) -> None:
    """Kills a private Ray cluster's processes, recognised by the cluster's folder, and removes the folder, after at
    most `GRACE_S` seconds even if processes remain. Most Ray processes end without help.

    Args:
        folder: Temporary folder of the cluster.
        driver: Id of a process that is not killed, besides this process.
    """

    def belongs(entry: Path) -> bool:
        command = (entry / "cmdline").read_bytes()
        if int(entry.name) in (os.getpid(), driver) or not any(mark in command for mark in RAY):
            return False
        return folder.encode() in command or any(os.readlink(fd).startswith(folder) for fd in (entry / "fd").iterdir())

    _kill_all(lambda: processes(belongs))
    shutil.rmtree(folder, ignore_errors=True)


def main(kind: str, pid: str, folder: str) -> None:
    """Waits for the end of the guarded process, or for end of file on standard input, and cleans up. The guarded
    process must hold the other end of this pipe: with /dev/null as input, the cleanup begins at once.

    Args:
        kind: `group`: kills the process's group, with the process itself if it still runs, and removes its shared
            memory and the folder; the guard runs in a forked child. `cluster`: kills the Ray processes of the folder,
            but not the guarded process, and removes the folder.
        pid: Id of the guarded process; may be gone already.
        folder: Temporary folder to remove.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Slurm sends SIGTERM to every process of a cancelled job
    group = kind == "group"
    if group and os.fork() > 0:
        os._exit(0)  # Ray's workers kill their children on exit: the guard must not be a child
    segments: set[str] = set()
    existing_shm = shared_memory_inodes()
    with contextlib.suppress(ProcessLookupError):  # already gone
        ends = [0, os.pidfd_open(int(pid))]  # stdin receives no data: it becomes readable at end of file
        while not select.select(ends, [], [], LOOK_EVERY_S if group else None)[0]:
            segments |= shared_memory(members(int(pid)))
    if group:
        segments |= shared_memory(members(int(pid)))
        end_group(int(pid))
        unlink(segments, existing_shm)
        shutil.rmtree(folder, ignore_errors=True)
    else:
        end_cluster(folder, int(pid))


if __name__ == "__main__":
    main(*sys.argv[1:])
