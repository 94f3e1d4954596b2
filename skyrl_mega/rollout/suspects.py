"""Which trajectory a worker has died of.

A worker has many open, and cannot say which of them ended it. So what may have is set apart, and less and less of it
together, until one is alone:

- Every trajectory that a worker had heard of when it died counts that death. One alone is chance: it is played again as
  any other.
- One that has counted two is suspected. Workers that play suspected ones play nothing else, and the more deaths these
  have counted, the fewer of them share a worker (`GROUPS`). While any wait, the worker with the least to do takes
  nothing else until their turn has come; with a single worker all others wait.
- One that has ended `ALONE` workers by itself has failed. Nothing fails that was never alone.
- Others of its prompt have the same environment and are suspected from then on: each is alone, and `ALONE_AS_KIN` are
  enough.
- A worker that dies of suspected ones alone was there to find out: `TRIALS` such deaths are one restart. So are those
  of which one that has failed is the cause, once it has; until then as many restarts as there are workers are lent.

Who plays for an evaluation at the same time has the same workers: all this is about the trajectories of both. One is
alone only where it is suspected: chance has to end five workers with the same one until it fails one that is well (two
where another of its prompt has failed).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from skyrl_mega.envs.prompt import Prompt

GROUPS = {2: 32, 3: 6}
"""Deaths → how many suspected trajectories under which so many workers have died may share one; under which more have,
1."""
SUSPECTED, SURE = min(GROUPS), max(GROUPS) + 1
"""Deaths from which on a trajectory is suspected, and from which on it is alone."""
ALONE, ALONE_AS_KIN = 3, 2
"""Workers that one has ended by itself when it has failed, and where another of its prompt has. One death may be
somebody else's doing even then."""

TRIALS = 8
"""Deaths of workers that had nothing but suspected trajectories, for one of `rollout.restarts`: so many that a group of
samples can be found out, and not so many that a run goes on whose workers die of everything."""


@dataclass(eq=False)
class Loss:
    """Of a worker."""

    had: list[int]
    """The deaths under each trajectory that it had, those of all sessions."""
    trial: bool
    """Whether it is one of `TRIALS`."""


@dataclass(frozen=True)
class Death:
    """A worker's, as one of its trajectories sees it."""

    cause: str
    counts: bool
    """Whether the worker had heard of the trajectory."""
    alone: bool
    """And of no other."""
    loss: Loss | None = None


@dataclass
class Record:
    """Of a trajectory."""

    deaths: int = 0
    """Of workers that had it open."""
    alone: int = 0
    """Of workers that had nothing else open."""
    kin: bool = False
    """Whether another of its prompt has failed."""
    losses: list[Loss] = field(default_factory=list)
    """Of workers that had it open."""

    @property
    def suspicion(self) -> int:
        """The deaths for which it is played apart."""
        return max(self.deaths, SURE) if self.kin else self.deaths

    @property
    def failed(self) -> bool:
        """Whether it is not played any more."""
        return self.alone >= (ALONE_AS_KIN if self.kin else ALONE)

    def add(self, death: Death) -> None:
        """One more."""
        self.deaths += death.counts
        self.alone += death.alone
        if death.counts and death.loss is not None:
            self.losses.append(death.loss)


def digest(prompt: Prompt) -> int:
    """Of what is in it: a row of another data set may have the same number."""
    return hash(str((prompt.env_class, prompt.messages, prompt.extras)))


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
