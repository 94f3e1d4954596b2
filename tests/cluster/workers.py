"""Actors of the tests, in a module without pytest: each actor's process imports it."""

from __future__ import annotations

import asyncio
import mmap
import os
import signal
import subprocess
import time
from pathlib import Path

from skyrl_mega.cluster import reaper
from skyrl_mega.common.errors import UserError


def mapped(name: str) -> mmap.mmap:
    """Returns a segment of shared memory, created if missing, without Python's resource tracker."""
    with Path(reaper.SHARED, name).open("ab+") as file:
        file.truncate(64)
        return mmap.mmap(file.fileno(), 64)


class Worker:
    """An actor with the faults and actions of the tests."""

    def __init__(self, number: int = 0, fault: str | None = None) -> None:
        if fault == "user":
            raise UserError("model.path=nowhere: there is no config.json")
        if fault == "other":
            raise ValueError("two\nlines")
        self.number = number

    def answer(self, more: int = 0) -> int:
        return self.number + more

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    def say(self, text: str) -> None:
        print(text, flush=True)
        subprocess.run(["sh", "-c", f"echo child {text} >&2"], check=True)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def fail(self, rank: int) -> None:
        """Kills rank `rank`; other ranks raise at once, like the peers of a collective."""
        if self.number == rank:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        raise ConnectionError("connection closed by peer")

    def children(self) -> tuple[int, int]:
        """Starts a child and a grandchild; returns this process's group and the child."""
        child = subprocess.Popen(["sh", "-c", "sleep 300 & sleep 300"])
        return os.getpgrp(), child.pid

    def share(self, names: list[str]) -> None:
        """Maps these names in shared memory."""
        self.mapped = [mapped(name) for name in names]

    def fork(self) -> None:
        """Forks a process with all open descriptors of this process, Ray's sockets included."""
        if os.fork() == 0:
            time.sleep(300)
            os._exit(0)


class Quick:
    """An actor with concurrent methods."""

    async def sleep(self, seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds
