"""Removal of containers in the background: a policy can make the removal of its files slow, and a slow removal is no
fault of a trajectory."""

from __future__ import annotations

import logging
import threading
import time

from skyrl_mega.envs.containers.runtime import Container
from skyrl_mega.envs.faults import InfrastructureFault

LONGEST_S = 1800.0
"""Seconds after which a removal is given up. The reaper removes the container at the end of this process."""
ATTEMPT_S = 600.0
"""Time limit in seconds of an attempt. Files removed by an attempt that is late stay removed."""
PAUSE_S = 5.0
"""Seconds between two attempts."""


def start_removal(container: Container) -> threading.Thread:
    """Starts a thread that removes a container, and returns the thread. The thread tries again after a failure, ends at
    the latest `LONGEST_S` seconds later (plus an attempt), and does not keep this process alive."""
    thread = threading.Thread(target=_remove, args=(container,), name="container-removal", daemon=True)
    thread.start()
    return thread


def _remove(container: Container) -> None:
    deadline = time.monotonic() + LONGEST_S
    while True:
        try:
            return container.remove(ATTEMPT_S)
        except InfrastructureFault as fault:
            if time.monotonic() > deadline:
                logging.getLogger(__name__).warning("%s; it is removed at the end of this process", fault)
                return None
        time.sleep(PAUSE_S)
