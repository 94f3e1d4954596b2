"""Limits on CPU time, for machines of varying speed."""

from __future__ import annotations

import time

import numpy as np

USUAL_S = 0.2
"""Seconds of a calibration (`slowness`) on a core of the two-core machine for which limits are set."""


def within(seconds: float, limit_s: float) -> bool:
    """Returns True if the seconds are within the limit, or within the limit times the machine's current slowness:
    shared cores were seen to become five times slower."""
    return seconds <= limit_s or seconds <= limit_s * slowness()


def slowness() -> float:
    """Returns the ratio of the calibration's current time to the usual time."""
    numbers = np.random.default_rng(0).random(4_000_000)
    start = time.thread_time()
    np.sort(numbers)
    counts = dict[int, int]()
    for i in range(2_400_000):
        counts[i % 5000] = counts.get(i % 5000, 0) + i
    return (time.thread_time() - start) / USUAL_S
