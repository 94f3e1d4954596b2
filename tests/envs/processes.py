"""Processes that tests start, look at and kill."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.envs.containers.boxes import NAMESPACES

ROOT = Path(__file__).parents[2]

needs_namespaces = pytest.mark.skipif(
    subprocess.run([*NAMESPACES, "true"], capture_output=True).returncode != 0,
    reason="this machine gives no PID namespace for a container",
)


@contextmanager
def owner(script: str, *words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Runs a Python program with arguments; yields its process and the first line that it prints, and kills it at the
    end of the `with` block.
    """
    process = subprocess.Popen([sys.executable, "-c", script, *words], stdout=subprocess.PIPE, cwd=ROOT, text=True)
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()


def wait_until(condition: Callable[[], object], seconds: float = 60) -> bool:
    """Waits until a function returns a true value, at most some seconds; returns whether it does."""
    deadline = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(met)


def children(pid: int) -> list[int]:
    """Returns the children of all threads of a process."""
    return [int(c) for task in Path(f"/proc/{pid}/task").glob("*/children") for c in task.read_text().split()]


def running(mark: str) -> list[str]:
    """Returns the command lines of live processes with the mark."""
    lines = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if mark in line:
                lines.append(line)
    return lines
