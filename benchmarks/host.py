"""Tools for benchmarks of files: memory of processes, and a cold page cache."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil


class Memory:
    """A context that records the largest private memory (USS) of processes in MB. Measuring a process stops the
    process.

    Args:
        processes: Called before each measurement for the processes to measure.
    """

    def __init__(self, processes: Callable[[], Sequence[psutil.Process]] = lambda: [psutil.Process()]) -> None:
        self._processes = processes

    def __enter__(self) -> Memory:
        self.peak, self._stop = 0.0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.02):
            for process in self._processes():
                try:
                    self.peak = max(self.peak, uss_mb(process))
                except psutil.Error:  # the process ended
                    continue


def uss_mb(process: psutil.Process) -> float:
    """Returns the private memory of a process in MB."""
    return float(process.memory_full_info().uss) / 1e6


def forget(folder: Path) -> None:
    """Drops a folder's files from the page cache."""
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
