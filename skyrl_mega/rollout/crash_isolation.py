"""Isolation of trajectories that crash rollout workers.

A rollout worker runs many trajectories at once, so a crash does not show which trajectory caused it. The candidates are
retried in ever smaller groups until a single trajectory runs alone:

- A crash counts for every trajectory already sent to the worker. A single crash may be bad luck: the trajectory is
  retried normally.
- A trajectory with two crashes is a suspect. A worker with suspects runs nothing else, and the more crashes the
  suspects have, the fewer suspects share a worker (`SUSPECTS_TOGETHER`). While a suspect waits, the least loaded worker
  accepts no other new trajectory; with a single worker all other trajectories wait.
- A trajectory fails after it crashed `SOLO_CRASHES` workers while running alone. No trajectory fails without having
  run alone.
- Other samples of the same prompt use the same environment. After the failure they are suspects at once: each runs
  alone and fails after `SOLO_CRASHES_SIBLING` solo crashes.
- A crash of a worker with suspects only is a probe, and `PROBES_PER_RESTART` probes use one restart. All crashes of a
  trajectory count as probes once the trajectory has failed. Until then the workers may take as many restarts beyond the
  budget as there are workers.

Rollouts and a concurrent evaluation share the workers, so the rules cover the trajectories of both. Only suspects can
count a solo crash: a healthy trajectory fails only after five unrelated crashes (two after a sibling failed).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from skyrl_mega.envs.prompt import Prompt

SUSPECTS_TOGETHER = {2: 32, 3: 6}
"""Crashes → largest number of suspects with so many crashes on a worker. Suspects with more crashes run alone."""
SUSPECTED, ISOLATED = min(SUSPECTS_TOGETHER), max(SUSPECTS_TOGETHER) + 1
"""Crashes from which a trajectory is a suspect, and from which a suspect runs alone."""
SOLO_CRASHES, SOLO_CRASHES_SIBLING = 3, 2
"""Solo crashes after which a trajectory fails: the normal limit, and the limit after a sibling failed. Even then a
single crash may have another cause."""

PROBES_PER_RESTART = 8
"""Probes (crashes of workers with suspects only) per restart of `rollout.restarts`. The number suffices to isolate a
sample in a prompt group, and still ends a run whose workers crash on every trajectory."""


@dataclass(eq=False)
class WorkerCrash:
    """A worker crash and the trajectories running on the worker."""

    crash_counts: list[int]
    """Earlier crashes of each trajectory on the worker, over all sessions."""
    probe: bool
    """True for a probe: the crash uses an eighth of a restart (`PROBES_PER_RESTART`)."""


@dataclass(frozen=True)
class Crash:
    """A worker crash as seen by a trajectory of the worker."""

    cause: str
    received: bool
    """True if the worker had received the trajectory."""
    solo: bool
    """True if this was the only trajectory on the worker."""
    worker_crash: WorkerCrash | None = None


@dataclass
class CrashHistory:
    """The crash history of a trajectory."""

    crashes: int = 0
    """Crashes of workers that were running the trajectory."""
    solo_crashes: int = 0
    """Crashes of workers that were running only this trajectory."""
    sibling_failed: bool = False
    """True if another sample of the same prompt failed."""
    worker_crashes: list[WorkerCrash] = field(default_factory=list)
    """The crashes counted in `crashes`."""

    @property
    def suspicion(self) -> int:
        """Number of crashes used for isolating the trajectory: at least `ISOLATED` after a sibling failed."""
        return max(self.crashes, ISOLATED) if self.sibling_failed else self.crashes

    @property
    def failed(self) -> bool:
        """True if the trajectory is not retried any more."""
        return self.solo_crashes >= (SOLO_CRASHES_SIBLING if self.sibling_failed else SOLO_CRASHES)

    def record(self, crash: Crash) -> None:
        """Counts another crash."""
        self.crashes += crash.received
        self.solo_crashes += crash.solo
        if crash.received and crash.worker_crash is not None:
            self.worker_crashes.append(crash.worker_crash)


def prompt_hash(prompt: Prompt) -> int:
    """Returns a hash of the prompt's content; `uid` alone is not unique across data sets."""
    return hash(str((prompt.env_class, prompt.messages, prompt.extras)))


def may_run(crashes: int, open_crashes: Collection[int], *, reserved: bool) -> bool:
    """Returns True if a trajectory may run on a worker.

    Args:
        crashes: Crashes of the trajectory.
        open_crashes: Crashes of each trajectory running on the worker.
        reserved: True if the worker is reserved for suspects.
    """
    if crashes < SUSPECTED:
        return not reserved and all(other < SUSPECTED for other in open_crashes)
    together = min(SUSPECTS_TOGETHER.get(each, 1) for each in (*open_crashes, crashes) if each >= SUSPECTED)
    return all(other >= SUSPECTED for other in open_crashes) and len(open_crashes) < together
