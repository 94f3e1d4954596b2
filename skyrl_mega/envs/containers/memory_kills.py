"""Processes that the kernel has killed for memory: whether a container used too much, or others did."""

from __future__ import annotations

import os
import re
from pathlib import Path

LOG = "/dev/kmsg"
"""The kernel's log; readable by root, and by other users where the machine allows it."""
MOST_RECORD = 8192
"""Maximum size of a record of the log in bytes."""


def memory_kills() -> int:
    """Returns the number of processes that the kernel has killed for memory since the start of this machine, whether a
    container or the machine was out of memory; 0 if unknown."""
    found = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.M)
    return int(found[1]) if found else 0


def others_caused(container: str, kills: int) -> bool:
    """Returns True if the kernel's log shows that none of the last memory kills is due to a container's own limit.
    Returns False if the log is not readable, or lacks the limit of a kill, as after many kills in a few seconds.

    Args:
        container: Id of the container, which is part of the name of its cgroup.
        kills: Number of kills to look at.
    """
    limits = kill_limits()[-kills:]
    return len(limits) == kills and all(limit and container not in limit for limit in limits)


def kill_limits() -> list[str]:
    """Returns the cgroup whose limit caused a kill, for each kill in the kernel's log, oldest first: `machine` if the
    machine was out of memory, "" if unknown. [] if the log is not readable."""
    limits, latest = [], ""
    for record in _records():
        if "oom-kill:" in record:
            found = re.search(r"oom_memcg=([^,\s]+)", record)
            latest = found[1] if found else "machine"
        elif "Killed process" in record:
            limits.append(latest)
            latest = ""
    return limits


def _records() -> list[str]:
    """Returns the records of the kernel's log, oldest first; none if the log is not readable."""
    records: list[str] = []
    try:
        log = os.open(LOG, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return records
    try:
        while True:
            try:
                record = os.read(log, MOST_RECORD)
            except BrokenPipeError:  # overwritten meanwhile; the next read goes on behind it
                continue
            except OSError:  # BlockingIOError at the end
                return records
            if not record:  # the end of a plain file
                return records
            records += record.decode(errors="replace").splitlines()
    finally:
        os.close(log)
