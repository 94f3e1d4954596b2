"""Which trajectory a worker has died of.

A worker has many open, and cannot say which of them ended it. So what may have is set apart, and less and less of it
together, until one is alone:

- Every trajectory that a worker had heard of when it died counts that death. One alone is chance: it is played again as
  any other.
- One that has counted two is suspected. Workers that play suspected ones play nothing else, and the more deaths these
  have counted, the fewer of them share a worker (`GROUPS`). While there are any, the worker with the least to do takes
  nothing else, so that their turn comes; with a single worker all others wait.
- One that has ended `ALONE` workers by itself has failed. Nothing fails that was never alone.
- Others of its prompt have the same environment and are suspected from then on: each is alone.
- A worker that dies of suspected ones alone was there to find out: `TRIALS` such deaths are one restart.

What a worker died of beside one that was alone there is not known (it may play for an evaluation at the same time), so
such a death counts as any other.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

GROUPS = {2: 32, 3: 6}
"""Deaths → how many suspected trajectories under which so many workers have died may share one; under which more have,
1."""
SUSPECTED, SURE = min(GROUPS), max(GROUPS) + 1
"""Deaths from which on a trajectory is suspected, and from which on it is alone."""
ALONE = 2
"""Workers that one has ended by itself when it has failed. One death may be somebody else's doing even then."""

TRIALS = 8
"""Deaths of workers that had nothing but suspected trajectories, for one of `rollout.restarts`: so many that a group of
samples can be found out, and not so many that a run goes on whose workers die of everything."""


@dataclass(frozen=True)
class Death:
    """A worker's, as one of its trajectories sees it."""

    cause: str
    counts: bool
    """Whether the worker had heard of the trajectory."""
    alone: bool
    """And of no other."""


@dataclass
class Record:
    """Of a trajectory."""

    deaths: int = 0
    """Of workers that had it open."""
    alone: int = 0
    """Of workers that had nothing else open."""

    @property
    def suspected(self) -> bool:
        """Whether it is played apart."""
        return self.deaths >= SUSPECTED

    @property
    def failed(self) -> bool:
        """Whether it is not played any more."""
        return self.alone >= ALONE

    def add(self, death: Death) -> None:
        """One more."""
        self.deaths += death.counts
        self.alone += death.alone

    def suspect(self) -> None:
        """As much as can be."""
        self.deaths = max(self.deaths, SURE)


def admitted(deaths: int, there: Collection[int], *, reserved: bool) -> bool:
    """Whether a trajectory may go to a worker.

    Args:
        deaths: Workers that have died under it.
        there: Under each of those that are open there.
        reserved: Whether the worker is kept for suspected ones.
    """
    if deaths < SUSPECTED:
        return not reserved and all(other < SUSPECTED for other in there)
    together = min(GROUPS.get(each, 1) for each in (*there, deaths) if each >= SUSPECTED)
    return all(other >= SUSPECTED for other in there) and len(there) < together
