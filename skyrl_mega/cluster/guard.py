"""Ends what an actor's process leaves behind: `python -I -S guard.py <process group>`.

An actor may start processes of its own (vLLM's engine core and workers). When it dies by SIGKILL, or its whole Ray
node dies with the driver, nobody tells them. So every actor leads a process group and holds the write end of this
guard's stdin: end of file means that the actor is gone, however it went, and the guard kills the rest of the group.
Standard library only: it starts in 20 ms.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

TRACKER = b"resource_tracker"
TRACKER_GRACE_S = 3.0


def members(group: int) -> list[int]:
    """Living processes (no zombies) of a process group on this machine."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        # A process may end between the listing and the reading.
        with contextlib.suppress(OSError):
            state, _, pgrp = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(pgrp) == group and state != "Z":
                found.append(int(entry.name))
    return found


def end_group(group: int) -> None:
    """Kills the group. Python's resource trackers go last: they unlink the shared memory of the others."""
    for pid in members(group):
        with contextlib.suppress(OSError):
            if TRACKER not in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + TRACKER_GRACE_S
    while members(group) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in members(group):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    while os.read(0, 64):  # nothing is ever written: this returns at end of file
        pass
    end_group(int(sys.argv[1]))
