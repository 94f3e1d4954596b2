"""Parts of a pull that all runtimes share: the lock against other processes, reports of a long wait, and the error of a
missing image."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from skyrl_mega.common.errors import UserError
from skyrl_mega.envs.faults import InfrastructureFault

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of a file system without locks."""
LOOK_S = 0.2
"""Seconds between two looks at a lock."""
REPORT_AFTER_S, REPORT_EVERY_S = 3.0, 10.0
"""Seconds until the first line about a slow block, and between two lines."""


@contextlib.contextmanager
def locked(path: Path, deadline: float, what: str) -> Iterator[bool]:
    """Holds a lock during the `with` block; yields False on a file system without locks. Prints progress of a long wait
    to standard error.

    Args:
        path: File of the lock.
        deadline: End of the wait, on the clock `time.monotonic()`.
        what: What the holder of the lock does, for people.

    Raises:
        InfrastructureFault: Another process still holds the lock at the deadline.
        OSError: The file cannot be opened.
    """
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        with reports(f"waiting for {what} by another process"):
            alone = _lock(descriptor, deadline, what)
        yield alone
    finally:
        os.close(descriptor)


def _lock(descriptor: int, deadline: float, what: str) -> bool:
    """Waits for a lock; returns False on a file system without locks."""
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise InfrastructureFault(f"another process did not finish {what} in time") from None
            time.sleep(LOOK_S)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            return False


@contextlib.contextmanager
def reports(text: str) -> Iterator[None]:
    """Prints a line with `text` about a slow block to standard error, again and again until the block ends."""
    ended, start = threading.Event(), time.monotonic()

    def report() -> None:
        wait_s = REPORT_AFTER_S
        while not ended.wait(wait_s):
            print(f"containers: {text}, {time.monotonic() - start:.0f} s so far", file=sys.stderr, flush=True)
            wait_s = REPORT_EVERY_S

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()


def missing_image(image: str, reason: str) -> UserError:
    """Returns, and does not raise, the error for an image that no further try can pull, for a reason of the runtime."""
    return UserError(
        f"the image cannot be pulled: {reason}",
        key="image",
        value=image,
        fix="give the name of an existing image with its registry, and log in to the registry on this machine",
    )
