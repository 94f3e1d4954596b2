"""Time series of concurrency (the number of active items), as step functions that can be cut, added and coarsened.

A series is stored as two running integrals: the count, and the time with a count above 0. Between two points both rates
are taken as constant. Means and idle shares between two points are exact, however coarse the points are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, eq=False)
class ConcurrencySeries:
    """Number of active items from `times[0]` to `times[-1]`; 0 outside."""

    times: Floats
    """Strictly increasing boundaries of the intervals, in seconds of the wall clock."""
    sums: Floats
    """Integral of the count up to each boundary, in items × seconds, plus a constant; only differences have a meaning.
    """
    busy: Floats
    """Seconds with a count above 0 up to each boundary, plus a constant; only differences have a meaning."""

    @classmethod
    def from_intervals(
        cls, times: Sequence[float] | Floats, counts: Sequence[float] | Floats, shares: Sequence[float] | Floats
    ) -> Self:
        """Returns a series built from intervals.

        Args:
            times: n + 1 boundaries, strictly increasing, in seconds of the wall clock.
            counts: n mean counts, for each interval.
            shares: n busy shares from 0 to 1: the part of each interval with a count above 0.
        """
        edges = np.asarray(times, dtype=np.float64)
        lengths = np.diff(edges)
        sums, busy = (np.concatenate([[0.0], np.cumsum(np.asarray(each) * lengths)]) for each in (counts, shares))
        return cls(edges, sums, busy)

    @classmethod
    def empty(cls, start: float, end: float) -> Self:
        """Returns a series from `start` to `end`, in seconds of the wall clock, with count 0."""
        return cls.from_intervals([start, end], [0.0], [0.0])

    @property
    def lengths(self) -> Floats:
        """Length of each of the n intervals in seconds, float64 [n]."""
        return np.diff(self.times)

    @property
    def counts(self) -> Floats:
        """Mean count of each interval, float64 [n]: integral / length."""
        return np.diff(self.sums) / self.lengths

    @property
    def shares(self) -> Floats:
        """Busy share of each interval, float64 [n], from 0 to 1: seconds with a count above 0 / length."""
        return np.clip(np.diff(self.busy) / self.lengths, 0.0, 1.0)

    def at(self, times: Sequence[float] | Floats) -> Self:
        """Returns the series with `times` as boundaries; outside the present range the count is 0."""
        edges = np.asarray(times, dtype=np.float64)
        return type(self)(edges, np.interp(edges, self.times, self.sums), np.interp(edges, self.times, self.busy))

    def between(self, start: float, end: float) -> Self:
        """Returns the series from `start` to `end`, cut or extended by count 0 to exactly this range."""
        inside = self.times[(self.times > start) & (self.times < end)]
        return self.at(np.concatenate([[start], inside, [end]]))

    def coarser(self, max_intervals: int) -> Self:
        """Returns the series with at most `max_intervals` intervals: of the points in each of equal time bins, the last
        is kept. Returns this series if it has no more intervals."""
        if len(self.times) - 1 <= max_intervals:
            return self
        start, end = self.times[0], self.times[-1]
        moment = np.minimum(((self.times - start) / (end - start) * (max_intervals - 1)).astype(int), max_intervals - 2)
        last = np.append(moment[1:] != moment[:-1], True)
        last[0] = True
        return type(self)(self.times[last], self.sums[last], self.busy[last])

    def followed_by(self, later: Sequence[ConcurrencySeries]) -> Self:
        """Returns this series joined with later series, given in order; the count in the gaps is 0.

        If a later series overlaps the time already covered, the overlapping part is dropped.
        """
        times, sums, busy = [self.times], [self.sums], [self.busy]
        end, total, worked = self.times[-1], self.sums[-1], self.busy[-1]
        for part in later:
            edges = part.times if part.times[0] > end else part.at(np.append(end, part.times[part.times > end])).times
            if len(edges) < 2:
                continue
            cut = part.at(edges)
            times.append(edges)
            sums.append(total + cut.sums - cut.sums[0])
            busy.append(worked + cut.busy - cut.busy[0])
            end, total, worked = edges[-1], sums[-1][-1], busy[-1][-1]
        joined = np.concatenate(times)
        _, first = np.unique(joined, return_index=True)
        return type(self)(joined[first], np.concatenate(sums)[first], np.concatenate(busy)[first])

    def __add__(self, other: ConcurrencySeries) -> Self:
        """Returns the sum of two series.

        Within an interval the busy periods of the two series are taken as independent, because the exact positions are
        unknown.
        """
        edges = np.union1d(self.times, other.times)
        first, second = self.at(edges), other.at(edges)
        shares = 1 - (1 - first.shares) * (1 - second.shares)
        return type(self).from_intervals(edges, first.counts + second.counts, shares)

    def total(self, start: float, end: float) -> float:
        """Returns the integral of the count from `start` to `end`, in items × seconds; outside of `times` the count is
        0."""
        return float(np.diff(np.interp([start, end], self.times, self.sums))[0])

    def busy_s(self, start: float, end: float) -> float:
        """Returns the seconds with a count above 0 from `start` to `end`; outside of `times` the count is 0."""
        return float(np.diff(np.interp([start, end], self.times, self.busy))[0])
