"""What engines and environments have under way, counted while it happens, at about a microsecond for each change.

Who plays trajectories tells of every request and call, from any thread; who writes a step down takes what has happened
since the last time. Changes within a moment are one, so that memory is bounded however much happens.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from skyrl_mega.telemetry.counted import Counted

MOMENT_S = 0.02
"""Changes closer than this are told as one stretch, with its mean."""
PARTS = 64
"""That another process has told are kept before they are joined."""
MOST = 2048
"""Points of a counter: where there are more, moments become longer."""


class Counter:
    """One count that goes up and down.

    Args:
        start: Seconds of any clock that never goes back.
    """

    def __init__(self, start: float) -> None:
        self.count = 0
        self._begin(start)

    def _begin(self, start: float) -> None:
        self.moment = MOMENT_S
        self.times, self.sums, self.busy = [start], [0.0], [0.0]

    def add(self, change: int, now: float) -> None:
        """So many more from now on."""
        self._reach(now)
        self.count += change

    def take(self, now: float, zero: float) -> Counted:
        """What it was up to now, since the last time; `zero` is added to its clock."""
        self._reach(now)
        found = Counted(np.array(self.times) + zero, np.array(self.sums), np.array(self.busy))
        self._begin(now)
        return found

    def _reach(self, now: float) -> None:
        """It has been the same since the last change."""
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
        if len(times) > MOST:
            self._thin()

    def _thin(self) -> None:
        """Moments become longer, until half of the points are left."""
        points = list(zip(self.times, self.sums, self.busy, strict=True))
        while len(points) > MOST // 2:
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
class Taken:
    """What has happened between two times of the day's clock. Another process may have counted it."""

    start: float
    end: float
    engines: Mapping[int, Counted]
    """Requests under way, by engine; one that is not there had none."""
    environments: Counted
    """Calls under way."""


def _joined(told: Sequence[Taken]) -> Taken:
    """What one process has told, one part after another, as one."""
    if len(told) == 1:
        return told[0]
    numbers = sorted({engine for part in told for engine in part.engines})
    parts = {engine: [part.engines[engine] for part in told if engine in part.engines] for engine in numbers}
    engines = {engine: of[0].then(of[1:]).coarser(MOST) for engine, of in parts.items()}
    environments = told[0].environments.then([part.environments for part in told[1:]]).coarser(MOST)
    return Taken(told[0].start, told[-1].end, engines, environments)


class Timeline:
    """Counts what engines and environments have under way. Any thread may tell it.

    Args:
        clock: Seconds, never going back.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._lock = threading.Lock()
        self._since = clock()
        self._engines: dict[int, Counter] = {}
        self._environments = Counter(self._since)
        self._others: dict[object, list[Taken]] = {}
        """By process, in order."""

    def requests(self, engine: int, change: int) -> None:
        """An engine has so many requests more, or fewer."""
        with self._lock:
            now = self.clock()
            counter = self._engines.get(engine)
            if counter is None:
                counter = self._engines[engine] = Counter(self._since)
            counter.add(change, now)

    def calls(self, change: int) -> None:
        """So many calls of environments more are under way, or fewer."""
        with self._lock:
            self._environments.add(change, self.clock())

    def merge(self, other: Taken, process: object = None) -> None:
        """Takes in what another process has counted: it is added to what this one has. Tell it before `take`.

        Args:
            other: What followed on what it has told before.
            process: Which.
        """
        with self._lock:
            told = self._others.setdefault(process, [])
            told.append(other)
            if len(told) > PARTS:
                self._others[process] = [_joined(told)]

    def take(self) -> Taken:
        """What has happened since the last time, which is forgotten here; what is under way stays so."""
        with self._lock:
            now, start = self.clock(), self._since
            zero = time.time() - now
            engines = {engine: counter.take(now, zero) for engine, counter in self._engines.items()}
            environments = self._environments.take(now, zero)
            others, self._others, self._since = self._others, {}, now
        begin, end = start + zero, now + zero
        for told in others.values():
            other = _joined(told)
            environments += other.environments.between(begin, end)
            for engine, counted in other.engines.items():
                own = engines.get(engine)
                part = counted.between(begin, end)
                engines[engine] = part if own is None else own + part
        return Taken(begin, end, engines, environments)
