"""Temporary folders of this process, in one that says whose they are: the next start removes those of the dead.

    <temporary folder>/skyrl-sandbox-<pid>-<start time>-<random>/lock     locked as long as its owner lives
                                                                 <name>/  one command's or one session's

A process that is killed removes nothing. Its lock is gone with it, though, whoever held it and however it died, so the
lock decides. The name says which process to look for, and covers the moment before the lock is there.
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
YOUNG_S = 60.0
"""A folder without a lock may be about to get one for so long."""

_homes: dict[int, str] = {}
_locks: list[int] = []
_making = threading.Lock()


def make() -> str:
    """A new empty folder, 0711: another user passes through and sees nothing."""
    path = tempfile.mkdtemp(dir=_home())
    os.chmod(path, 0o711)
    return path


def owner() -> str:
    """Names this process among all of this machine: pid and start time."""
    return f"{os.getpid()}-{_start_time(os.getpid())}"


def alive(name: str) -> bool:
    """Whether the process that a name `PREFIX<pid>-<start time>…` speaks of lives, as far as can be seen from here."""
    found = re.match(re.escape(PREFIX) + r"(\d+)-(\d+)", name)
    return found is not None and _start_time(int(found[1])) == found[2]


def _home() -> str:
    """This process's own; a fork makes another."""
    with _making:
        pid = os.getpid()
        if pid not in _homes or not os.path.isdir(_homes[pid]):
            root = os.path.realpath(tempfile.gettempdir())
            sweep(root)
            home = tempfile.mkdtemp(prefix=f"{PREFIX}{owner()}-", dir=root)
            lock = os.open(os.path.join(home, "lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.chmod(home, 0o711)
            _locks.append(lock)
            _homes[pid] = home
            atexit.register(_leave, pid, home)
        return _homes[pid]


def _leave(pid: int, home: str) -> None:
    if os.getpid() == pid:
        tree.remove(home)


def sweep(root: str) -> None:
    """Removes what dead processes of this user left in a folder."""
    for path in Path(root).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # somebody else's, or removed by another one that starts
            info = path.lstat()
            if info.st_uid == os.geteuid() and not path.is_symlink() and not alive(path.name):
                _remove_unowned(path, time.time() - info.st_mtime)


def _remove_unowned(path: Path, age_s: float) -> None:
    try:
        lock = os.open(path / "lock", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        if age_s > YOUNG_S:
            tree.remove(str(path))
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: its owner lives where this cannot see it
        tree.remove(str(path))
    finally:
        os.close(lock)


def _start_time(pid: int) -> str | None:
    """Clock ticks after boot at which a process began; None where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None
