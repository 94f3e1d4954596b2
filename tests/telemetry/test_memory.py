"""Memory of a process, compared with memory allocated and freed by the test."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from skyrl_mega.telemetry.memory import MemoryMeter

MIB = 2**20
TAKEN = 96 * MIB


def take() -> None:
    """Allocates and frees memory."""
    held = np.ones(TAKEN, np.uint8)
    del held


def peaks() -> list[int]:
    """Returns the peaks before, during and after an allocation."""
    meter = MemoryMeter("cpu")
    meter.read()
    before = meter.read().peak
    take()
    return [before, meter.read().peak, meter.read().peak]


def test_the_most_since_the_last_reading_is_what_was_taken_in_between() -> None:
    """Measures in a separate process: memory freed by other threads of this process would count too."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        before, during, after = pool.submit(peaks).result(timeout=120)
    assert during - before == pytest.approx(TAKEN, abs=4 * MIB)
    assert after == pytest.approx(before, abs=4 * MIB), "what was given back is not in the next reading"


def test_where_no_new_mark_may_be_begun_it_is_what_there_is_now(tmp_path: Path) -> None:
    """Reads the current memory if the kernel refuses a new mark, as in some containers.

    The old mark would cover the process's whole life.
    """
    (tmp_path / "self" / "clear_refs").mkdir(parents=True)  # not writable for anybody
    (tmp_path / "self" / "status").write_text("Name:\tpython\nVmHWM:\t  900 kB\nVmRSS:\t  300 kB\nThreads:\t1\n")
    (tmp_path / "meminfo").write_text(
        "MemTotal:  1000 kB\nMemFree:  100 kB\nMemAvailable:  400 kB\nHugePages_Total: 0\n"
    )
    reading = MemoryMeter("cpu", tmp_path).read()
    assert (reading.peak, reading.node) == (300 * 1024, 600 * 1024)
    assert reading.device is None and reading.retries is None


def test_a_gpus_reading_is_the_most_since_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads torch's own counters; cumulative counters are reported as differences."""
    import torch

    peaks = iter([(5, 7, 1, 10), (3, 7, 1, 12)])
    keys = ("allocated_bytes.all.peak", "reserved_bytes.all.peak", "num_alloc_retries", "num_device_alloc")
    resets: list[int] = []
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: dict(zip(keys, next(peaks), strict=True)))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: resets.append(1))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (20, 80))
    meter = MemoryMeter("cuda")
    first, second = meter.read(), meter.read()
    assert (first.peak, first.reserved, first.device, first.retries, first.allocations) == (5, 7, 60, 1, 10)
    assert (second.peak, second.retries, second.allocations) == (3, 0, 2)
    assert len(resets) == 2
