"""Tools for benchmarks: memory and CPU time of processes, bandwidth of the memory, and a cold page cache."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import torch


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


def cpu_seconds(processes: Sequence[psutil.Process]) -> float:
    """Returns the CPU seconds used by these processes, without those that have ended."""
    total = 0.0
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def read_bandwidth(mib: int = 512, rounds: int = 5) -> float:
    """Returns the rate in GB/s at which all cores together read memory; the best of some rounds."""
    numbers = torch.ones(mib * 2**18)
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        numbers.sum()
        best = min(best, time.perf_counter() - start)
    return mib * 2**20 / best / 1e9


def forget(folder: Path) -> None:
    """Drops a folder's files from the page cache."""
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
