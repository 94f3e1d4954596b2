"""How many of something were under way, and when: a step function that may be cut, added up and made coarser.

It is kept as two running integrals, between whose points it is taken to be even: the count, and whether there was any.
However coarse the points are, means and idle shares between two of them are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, eq=False)
class Counted:
    """What was under way from `times[0]` to `times[-1]`; before and after that nothing was."""

    times: Floats
    """Seconds of the day's clock, each later than the one before: the ends of stretches."""
    sums: Floats
    """∫ count up to each of them."""
    busy: Floats
    """Seconds with a count above 0 up to each of them."""

    @classmethod
    def of(
        cls, times: Sequence[float] | Floats, counts: Sequence[float] | Floats, shares: Sequence[float] | Floats
    ) -> Self:
        """From each stretch's mean count, and the share of it in which there was any: one less than the times."""
        at = np.asarray(times, dtype=np.float64)
        lengths = np.diff(at)
        sums, busy = (np.concatenate([[0.0], np.cumsum(np.asarray(each) * lengths)]) for each in (counts, shares))
        return cls(at, sums, busy)

    @classmethod
    def none(cls, start: float, end: float) -> Self:
        """Nothing."""
        return cls.of([start, end], [0.0], [0.0])

    @property
    def lengths(self) -> Floats:
        """Seconds of each stretch."""
        return np.diff(self.times)

    @property
    def counts(self) -> Floats:
        """The mean count of each stretch."""
        return np.diff(self.sums) / self.lengths

    @property
    def shares(self) -> Floats:
        """The share of each stretch in which there was any."""
        return np.clip(np.diff(self.busy) / self.lengths, 0.0, 1.0)

    def at(self, times: Sequence[float] | Floats) -> Self:
        """The same with these ends of stretches."""
        edges = np.asarray(times, dtype=np.float64)
        return type(self)(edges, np.interp(edges, self.times, self.sums), np.interp(edges, self.times, self.busy))

    def between(self, start: float, end: float) -> Self:
        """What was under way between two times."""
        inside = self.times[(self.times > start) & (self.times < end)]
        return self.at(np.concatenate([[start], inside, [end]]))

    def coarser(self, most: int) -> Self:
        """With at most so many stretches: where changes are dense, only the last one of each moment is kept."""
        if len(self.times) - 1 <= most:
            return self
        start, end = self.times[0], self.times[-1]
        moment = np.minimum(((self.times - start) / (end - start) * (most - 1)).astype(int), most - 2)
        last = np.append(moment[1:] != moment[:-1], True)
        last[0] = True
        return type(self)(self.times[last], self.sums[last], self.busy[last])

    def then(self, later: Sequence[Counted]) -> Self:
        """With what followed, in order; nothing was under way between them."""
        times, sums, busy = [self.times], [self.sums], [self.busy]
        end, total, worked = self.times[-1], self.sums[-1], self.busy[-1]
        for part in later:
            at = part.times if part.times[0] > end else part.at(np.append(end, part.times[part.times > end])).times
            if len(at) < 2:
                continue
            one = part.at(at)
            times.append(at)
            sums.append(total + one.sums - one.sums[0])
            busy.append(worked + one.busy - one.busy[0])
            end, total, worked = at[-1], sums[-1][-1], busy[-1][-1]
        joined = np.concatenate(times)
        _, first = np.unique(joined, return_index=True)
        return type(self)(joined[first], np.concatenate(sums)[first], np.concatenate(busy)[first])

    def __add__(self, other: Counted) -> Self:
        """What was under way in both together.

        Where neither was busy without a break, how their breaks meet is not known; they are taken to be independent.
        """
        edges = np.union1d(self.times, other.times)
        one, two = self.at(edges), other.at(edges)
        shares = 1 - (1 - one.shares) * (1 - two.shares)
        return type(self).of(edges, one.counts + two.counts, shares)

    def total(self, start: float, end: float) -> float:
        """∫ count between two times."""
        return float(np.diff(np.interp([start, end], self.times, self.sums))[0])

    def busy_s(self, start: float, end: float) -> float:
        """Seconds with a count above 0 between two times."""
        return float(np.diff(np.interp([start, end], self.times, self.busy))[0])
