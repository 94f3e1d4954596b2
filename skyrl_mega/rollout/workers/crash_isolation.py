"""Isolation of trajectories that crash rollout workers.

A rollout worker runs many trajectories at once, so a crash does not show which trajectory caused it:

- A crash counts for every trajectory already sent to the worker. A single crash may be bad luck: the trajectory is
  retried normally. After `COMPANY_CRASHES` crashes the trajectory is quarantined.
- A quarantined trajectory shares a worker with quarantined ones only: first with many, after further crashes with few,
  then it runs alone (`TOGETHER`). So innocent trajectories leave quarantine in groups. While any of them waits, the
  least loaded worker accepts nothing else and so becomes the quarantine worker; with a single worker all other
  trajectories wait.
- A trajectory fails after `ALONE_CRASHES` crashes while running alone. No trajectory fails without having run alone.
- Other samples of the same prompt use the same environment. After the failure these are quarantined at once, and fail
  after `ALONE_CRASHES_SIBLING` crashes.
- Crashes explained by a single trajectory are cheap (`EXPLAINED_PER_RESTART`): a crash of a worker in quarantine, and
  all crashes of a trajectory once the trajectory has failed. While a crash is being isolated, the workers may take as
  many restarts beyond the budget as there are workers.

Rollouts and a concurrent evaluation share the workers, so the rules cover the trajectories of both. A healthy
trajectory fails only after seven unrelated crashes (two after a sibling failed).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from skyrl_mega.envs.prompt import Prompt

COMPANY_CRASHES = 2
"""Number of crashes leading to quarantine."""
TOGETHER = {2: 32, 3: 6}
"""Crashes of a quarantined trajectory → most trajectories on its worker. After more crashes it runs alone."""
ALONE_CRASHES, ALONE_CRASHES_SIBLING = 3, 2
"""Crashes while running alone after which a trajectory fails: the normal limit, and the limit after a sibling failed.
Even then a single crash may have another cause."""
EXPLAINED_PER_RESTART = 8
"""Explained crashes per restart of `rollout.restarts`. The number suffices for all samples of a prompt, and still ends
a run whose workers crash on every trajectory."""


@dataclass(eq=False)
class CrashHistory:
    """The worker crashes of a trajectory."""

    workers: list[Any] = field(default_factory=list)
    """Actors that crashed while running the trajectory."""
    alone: int = 0
    """Crashes while the trajectory ran alone."""
    sibling_failed: bool = False
    """True if another sample of the same prompt failed."""

    @property
    def quarantined(self) -> bool:
        """True if the trajectory may share a worker only with other quarantined trajectories: after `COMPANY_CRASHES`
        crashes, or after another sample of the prompt failed."""
        return self.sibling_failed or len(self.workers) >= COMPANY_CRASHES

    @property
    def together(self) -> int:
        """Most trajectories on the worker of this quarantined trajectory, itself included: by the number of its crashes
        (`TOGETHER`, else 1); 1 after another sample of the prompt failed."""
        return 1 if self.sibling_failed else TOGETHER.get(len(self.workers), 1)

    @property
    def failed(self) -> bool:
        """True if the trajectory is not retried any more, after too many crashes while running alone: `ALONE_CRASHES`,
        or `ALONE_CRASHES_SIBLING` after another sample of the prompt failed."""
        return self.alone >= (ALONE_CRASHES_SIBLING if self.sibling_failed else ALONE_CRASHES)

    def record(self, worker: Any) -> None:
        """Appends to `workers` an actor that crashed while running the trajectory. Counts the crash in `alone` too, if
        the trajectory was quarantined and its worker could run no other trajectory (`together` 1)."""
        self.alone += self.quarantined and self.together == 1
        self.workers.append(worker)


def prompt_hash(prompt: Prompt) -> int:
    """Returns a hash of a prompt's environment, messages and extras, valid in this process only; `uid` alone is not
    unique across data sets."""
    return hash(str((prompt.env_class, prompt.messages, prompt.extras)))
