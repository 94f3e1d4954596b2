"""Limits on seconds of computing, on machines that are not always equally fast."""

from __future__ import annotations

import time

import numpy as np

USUAL_S = 0.2
"""Of a piece of work (`slowness`) on one of the two cores that limits are written for."""


def within(seconds: float, limit_s: float) -> bool:
    """Whether computing took no longer than it may. Cores that others share have been seen to take five times as long
    as before: where the limit is passed, a piece of work tells what it would be at the moment."""
    return seconds <= limit_s or seconds <= limit_s * slowness()


def slowness() -> float:
    """How many times as long as usual a piece of work takes now."""
    numbers = np.random.default_rng(0).random(4_000_000)
    start = time.process_time()
    np.sort(numbers)
    counts = dict[int, int]()
    for i in range(2_400_000):
        counts[i % 5000] = counts.get(i % 5000, 0) + i
    return (time.process_time() - start) / USUAL_S
