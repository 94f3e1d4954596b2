"""Isolation of trajectories that crash rollout workers.

A rollout worker runs many trajectories at once, so a crash does not show which trajectory caused it. The candidates are
retried in ever smaller groups until a single trajectory runs alone:

- A crash counts for every trajectory already sent to the worker. A single crash may be bad luck: the trajectory is
  retried normally.
- A trajectory with two crashes is a suspect. A worker with suspects runs nothing else, and the more crashes the
  suspects have, the fewer suspects share a worker (`GROUPS`). While a suspect waits, the least loaded worker accepts no
  other new trajectory; with a single worker all other trajectories wait.
- A trajectory fails after `ALONE` crashes of workers running nothing else. No trajectory fails without having run
  alone.
- Other samples of the same prompt use the same environment. After the failure they are suspects at once: each runs
  alone and fails after `ALONE_AS_KIN` solo crashes.
- A crash of a worker with suspects only is a probe, and `TRIALS` probes use one restart. All crashes of a trajectory
  count as probes once the trajectory has failed. Until then the workers may take as many restarts beyond the budget as
  there are workers.

Rollouts and a concurrent evaluation share the workers, so the rules cover the trajectories of both. Only suspects can
count a solo crash: a healthy trajectory fails only after five unrelated crashes (two after a sibling failed).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from skyrl_mega.envs.prompt import Prompt

GROUPS = {2: 32, 3: 6}
"""Crashes → largest number of suspects with so many crashes on a worker. Suspects with more crashes run alone."""
SUSPECTED, SURE = min(GROUPS), max(GROUPS) + 1
"""Crashes from which a trajectory is a suspect, and from which a suspect runs alone."""
ALONE, ALONE_AS_KIN = 3, 2
"""Solo crashes after which a trajectory fails: the normal limit, and the limit after a sibling failed. Even then a
single crash may have another cause."""

TRIALS = 8
"""Probes (crashes of workers with suspects only) per restart of `rollout.restarts`. The number suffices to isolate a
sample in a prompt group, and still ends a run whose workers crash on every trajectory."""


@dataclass(eq=False)
class Loss:
    """A worker crash and the trajectories running on the worker."""

    had: list[int]
    """Earlier crashes of each trajectory on the worker, over all sessions."""
    trial: bool
    """True for a probe: the crash uses an eighth of a restart (`TRIALS`)."""


@dataclass(frozen=True)
class Death:
    """A worker crash as seen by a trajectory of the worker."""

    cause: str
    counts: bool
    """True if the worker had received the trajectory."""
    alone: bool
    """True if this was the only trajectory on the worker."""
    loss: Loss | None = None


@dataclass
class Record:
    """The crash history of a trajectory."""

    deaths: int = 0
    """Crashes of workers that were running the trajectory."""
    alone: int = 0
    """Crashes of workers that were running only this trajectory."""
    kin: bool = False
    """True if another sample of the same prompt failed."""
    losses: list[Loss] = field(default_factory=list)
    """The crashes counted in `deaths`."""

    @property
    def suspicion(self) -> int:
        """Number of crashes used for isolating the trajectory: at least `SURE` after a sibling failed."""
        return max(self.deaths, SURE) if self.kin else self.deaths

    @property
    def failed(self) -> bool:
        """True if the trajectory is not retried any more."""
        return self.alone >= (ALONE_AS_KIN if self.kin else ALONE)

    def add(self, death: Death) -> None:
        """Counts another crash."""
        self.deaths += death.counts
        self.alone += death.alone
        if death.counts and death.loss is not None:
            self.losses.append(death.loss)


def digest(prompt: Prompt) -> int:
    """Returns a hash of the prompt's content; `uid` alone is not unique across data sets."""
    return hash(str((prompt.env_class, prompt.messages, prompt.extras)))


def admitted(deaths: int, there: Collection[int], *, reserved: bool) -> bool:
    """Returns True if a trajectory may run on a worker.

    Args:
        deaths: Crashes of the trajectory.
        there: Crashes of each trajectory running on the worker.
        reserved: True if the worker is reserved for suspects.
    """
    if deaths < SUSPECTED:
        return not reserved and all(other < SUSPECTED for other in there)
    together = min(GROUPS.get(each, 1) for each in (*there, deaths) if each >= SUSPECTED)
    return all(other >= SUSPECTED for other in there) and len(there) < together
