"""Live counters of running engine requests and environment calls, at about a microsecond per change.

Rollouts report every request and call, from any thread. The writer of a step's timeline takes everything since its last
call. Changes within a moment are merged, so memory is bounded whatever the number of changes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from skyrl_mega.telemetry.concurrency_series import ConcurrencySeries

MOMENT_S = 0.02
"""Minimum length in seconds of a stored interval; closer changes are averaged."""
MAX_REPORTS = 64
"""Number of reports per process kept before joining."""
MAX_POINTS = 2048
"""Maximum number of points per counter; a longer series gets a doubled minimum interval."""


class Counter:
    """A count that goes up and down, recorded as a series over time.

    Args:
        start: Start time in seconds of any monotonic clock.
    """

    def __init__(self, start: float) -> None:
        self.count = 0
        self._begin(start)

    def _begin(self, start: float) -> None:
        self.moment = MOMENT_S
        self.times, self.sums, self.busy = [start], [0.0], [0.0]

    def add(self, change: int, now: float) -> None:
        """Adds `change` to the count from time `now` on, by the clock of `start`."""
        self._reach(now)
        self.count += change

    def take(self, now: float, zero: float) -> ConcurrencySeries:
        """Returns the series from the last call to `now` and starts a new series; the count stays.

        Args:
            now: Present time by the clock of `start`.
            zero: Seconds added to all times, to convert this clock to the wall clock.
        """
        self._reach(now)
        series = ConcurrencySeries(np.array(self.times) + zero, np.array(self.sums), np.array(self.busy))
        self._begin(now)
        return series

    def _reach(self, now: float) -> None:
        """Extends the series to `now` with the current count."""
        times = self.times
        length = now - times[-1]
        if length <= 0:
            return
        point = now, self.sums[-1] + self.count * length, self.busy[-1] + (length if self.count > 0 else 0.0)
        if len(times) > 1 and now - times[-2] < self.moment:
            times[-1], self.sums[-1], self.busy[-1] = point
            return
        times.append(point[0])
        self.sums.append(point[1])
        self.busy.append(point[2])
        if len(times) > MAX_POINTS:
            self._thin()

    def _thin(self) -> None:
        """Doubles the minimum interval until at most half of `MAX_POINTS` points are left."""
        points = list(zip(self.times, self.sums, self.busy, strict=True))
        while len(points) > MAX_POINTS // 2:
            self.moment *= 2
            kept = points[:2]
            for point in points[2:]:
                if point[0] - kept[-2][0] < self.moment:
                    kept[-1] = point
                else:
                    kept.append(point)
            points = kept
        self.times, self.sums, self.busy = (list(column) for column in zip(*points, strict=True))


@dataclass(frozen=True)
class ActivityReport:
    """Series between two times of the wall clock, possibly recorded by another process."""

    start: float
    end: float
    engines: Mapping[int, ConcurrencySeries]
    """Running requests, by engine; a missing engine stands for no requests."""
    environments: ConcurrencySeries
    """Running environment calls."""


def _joined(reports: Sequence[ActivityReport]) -> ActivityReport:
    """Joins consecutive reports of a process into a single report."""
    if len(reports) == 1:
        return reports[0]
    numbers = sorted({engine for part in reports for engine in part.engines})
    parts = {engine: [part.engines[engine] for part in reports if engine in part.engines] for engine in numbers}
    engines = {engine: series[0].followed_by(series[1:]).coarser(MAX_POINTS) for engine, series in parts.items()}
    environments = reports[0].environments.followed_by([part.environments for part in reports[1:]]).coarser(MAX_POINTS)
    return ActivityReport(reports[0].start, reports[-1].end, engines, environments)


class Timeline:
    """Counts running engine requests and environment calls. Thread-safe.

    Args:
        clock: Monotonic clock, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._lock = threading.Lock()
        self._since = clock()
        self._engines: dict[int, Counter] = {}
        self._environments = Counter(self._since)
        self._others: dict[object, list[ActivityReport]] = {}
        """Process -> its reports, in order."""

    def requests(self, engine: int, change: int) -> None:
        """Adds `change`, +1 or -1 for a start or an end, to the number of running requests of an engine."""
        with self._lock:
            now = self.clock()
            counter = self._engines.get(engine)
            if counter is None:
                counter = self._engines[engine] = Counter(self._since)
            counter.add(change, now)

    def calls(self, change: int) -> None:
        """Adds `change`, +1 or -1 for a start or an end, to the number of running environment calls."""
        with self._lock:
            self._environments.add(change, self.clock())

    def merge(self, other: ActivityReport, process: object = None) -> None:
        """Keeps a report from another process; the next `take` adds its counts to those of this process.

        Args:
            other: Report of the time after the process's previous report.
            process: Key of the process; None is a key too. Reports of the same process are joined in time, not added.
        """
        with self._lock:
            reports = self._others.setdefault(process, [])
            reports.append(other)
            if len(reports) > MAX_REPORTS:
                self._others[process] = [_joined(reports)]

    def take(self) -> ActivityReport:
        """Returns and forgets everything recorded since the last call, with the reports given to `merge`.

        Requests and calls still running remain counted.
        """
        with self._lock:
            now, start = self.clock(), self._since
            zero = time.time() - now
            engines = {engine: counter.take(now, zero) for engine, counter in self._engines.items()}
            environments = self._environments.take(now, zero)
            others, self._others, self._since = self._others, {}, now
        begin, end = start + zero, now + zero
        for reports in others.values():
            other = _joined(reports)
            environments += other.environments.between(begin, end)
            for engine, counted in other.engines.items():
                local = engines.get(engine)
                part = counted.between(begin, end)
                engines[engine] = part if local is None else local + part
        return ActivityReport(begin, end, engines, environments)
