"""Temporary folders below a folder named after its owner process; the next start removes the folders of dead owners.

    <temporary folder>/skyrl-sandbox-<pid>-<start time>-<random>/lock     locked while the owner lives
                                                                 <name>/  folder of one command or one session

A killed process removes nothing, but its lock is always released, so the lock decides. The name identifies the process,
and covers the moment before the lock exists.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import re
import tempfile
import threading
import time
from pathlib import Path

from skyrl_mega.envs.sandbox import tree

PREFIX = "skyrl-sandbox-"
ABANDONED_AFTER_S = 60.0
"""Seconds before a folder without a lock counts as abandoned; a younger folder may be about to get a lock."""

_process_folders: dict[int, str] = {}
_locks: list[int] = []
_lock = threading.Lock()


def make() -> str:
    """Creates an empty folder and returns its path. The folder is removed at the end of this process.

    Mode 0711 lets other users pass through but not look inside. Raises OSError if the folder cannot be created.
    """
    path = tempfile.mkdtemp(dir=_process_folder())
    os.chmod(path, 0o711)
    return path


def owner() -> str:
    """Returns a name of this process as the owner of sandbox folders, unique on the machine: `<pid>-<start time>`."""
    return f"{os.getpid()}-{_start_time(os.getpid())}"


def alive(name: str) -> bool:
    """Returns True if the process in a name `PREFIX<pid>-<start time>…` is alive, as far as visible here."""
    match = re.match(re.escape(PREFIX) + r"(\d+)-(\d+)", name)
    return match is not None and _start_time(int(match[1])) == match[2]


def _process_folder() -> str:
    """Returns this process's own folder; a forked process creates another."""
    with _lock:
        pid = os.getpid()
        if pid not in _process_folders or not os.path.isdir(_process_folders[pid]):
            root = os.path.realpath(tempfile.gettempdir())
            sweep(root)
            folder = tempfile.mkdtemp(prefix=f"{PREFIX}{owner()}-", dir=root)
            lock = os.open(os.path.join(folder, "lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.chmod(folder, 0o711)
            _locks.append(lock)
            _process_folders[pid] = folder
            atexit.register(_remove_at_exit, pid, folder)
        return _process_folders[pid]


def _remove_at_exit(pid: int, folder: str) -> None:
    if os.getpid() == pid:
        tree.remove(folder)


def sweep(root: str) -> None:
    """Removes the folders that this user's dead processes left behind directly below the folder `root`."""
    for path in Path(root).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, or removed concurrently
            info = path.lstat()
            if info.st_uid == os.geteuid() and not path.is_symlink() and not alive(path.name):
                _remove_unowned(path, time.time() - info.st_mtime)


def _remove_unowned(path: Path, age_s: float) -> None:
    try:
        lock = os.open(path / "lock", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        if age_s > ABANDONED_AFTER_S:
            tree.remove(str(path))
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: the owner is alive, but invisible here
        tree.remove(str(path))
    finally:
        os.close(lock)


def _start_time(pid: int) -> str | None:
    """Returns the start time of a process in clock ticks after boot; None if the process does not exist."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None
