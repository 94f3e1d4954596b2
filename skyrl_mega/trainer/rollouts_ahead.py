"""The interface between the loop and the rollouts, synchronous or ahead of training.

A weight version is the number of the step before the sync: step n trains version n - 1 if every step syncs.
Trajectories generated ahead are of older versions; the difference is the staleness.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from skyrl_mega.trainer.step import Step
from skyrl_mega.trajectories.trajectory import Group, Trajectory


class Rollouts:
    """Supplies groups of trajectories, step by step. A method without effect here does nothing for rollouts that are
    never ahead of training."""

    def next_groups(self, step: Step) -> list[Group]:
        """Returns the groups for a step's training, after generating or waiting; [] if too few prompts are left. Adds
        all sampled trajectories, and metrics, to `step`.

        Raises:
            ActorFailed: An engine or a rollout worker failed, and none restarts.
            StaleTooFar: A token is older than `asynchrony.max_staleness` allows.
            WrongRoutes: An engine's expert routes do not match the tokens.
            UserError: A trajectory lacks the reward named by `algorithm.dynamic_sampling.reward`, or the generator or
                the chat template is unusable.
            Stopped: The run must end.
        """
        raise NotImplementedError

    def before_sync(self, step: Step) -> None:
        """Prepares for a sync of the step's weights, or for an evaluation: waits for rollouts that must not see new
        weights.

        Raises:
            ActorFailed: An engine or a rollout worker failed, and none restarts.
            WrongRoutes: An engine's expert routes do not match the tokens.
            UserError: A trajectory lacks the reward named by `algorithm.dynamic_sampling.reward`, or the generator or
                the chat template is unusable.
            Stopped: The run must end.
        """

    def synced(self, version: int) -> None:
        """Records that all working engines now run weights `version`. To be called after every sync, also outside of a
        step."""

    def prompts_left(self, done: int) -> int:
        """Returns the number of prompts that no step up to number `done` has taken, including prompts generated
        ahead."""
        raise NotImplementedError

    def save(self, folder: Path, done: int) -> None:
        """Writes trajectories not yet trained on by steps up to number `done`, and the position in the data, into a
        checkpoint's `folder`, which must exist.

        Raises:
            ActorFailed: A rollout worker could not write its turns.
            ClusterError: The trajectories' arrays are lost, or writing took too long.
            OSError: A file could not be written.
        """

    def restore(self, folder: Path) -> str:
        """Restores trajectories saved by `save`, in any mode, and returns a line about the restored or discarded
        groups, with the reason; empty if nothing was saved.

        Raises:
            UserError: `rollouts.json` cannot be read, or the number of data rows, the seed or the shuffling differs
                from the saved run's.
            OSError, pyarrow.ArrowException, TypeError, ValueError: `rollouts.parquet` cannot be read.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Stops all generation; a second call does nothing."""


class StaleTooFar(RuntimeError):
    """A step was about to train on tokens older than `asynchrony.max_staleness` allows: a bug."""


@dataclass
class Versions:
    """The weight versions of the engines so far. Staleness counts syncs, because a step without groups does not sync.

    Args:
        max_staleness: `asynchrony.max_staleness`.
    """

    max_staleness: int
    recent: list[int] = field(default_factory=list)
    """Recent versions, the newest last; enough to measure the allowed staleness."""

    @property
    def newest(self) -> int:
        """The version on the engines, also the version in training. Raises IndexError before the first `add`."""
        return self.recent[-1]

    def add(self, version: int) -> None:
        """Appends a version that the engines have received to `recent`, and drops versions too old to matter. Does
        nothing if the version is known."""
        if version not in self.recent:
            self.recent = [*self.recent, version][-self.max_staleness - 2 :]

    def syncs_since(self, version: int) -> int:
        """Returns the number of syncs since the engines last ran this version: of entries of `recent` above
        `version`."""
        return sum(recent > version for recent in self.recent)

    def measure(self, trajectories: Iterable[Trajectory]) -> dict[str, float]:
        """Returns `asynchrony/staleness_mean`, over the policy's tokens, and `asynchrony/staleness_max` of the
        trajectories about to be trained on, both in syncs; both 0 without tokens.

        Raises:
            StaleTooFar: A token is too old.
        """
        tokens = sums = worst = 0
        for t in trajectories:
            for (version, _), count in zip(t.versions, t.tokens_by_version(), strict=True):
                syncs_since = self.syncs_since(version)
                tokens, sums, worst = tokens + count, sums + count * syncs_since, max(worst, syncs_since)
        if worst > self.max_staleness:
            raise StaleTooFar(
                f"a step has tokens of weights that are {worst} syncs old, asynchrony.max_staleness is "
                f"{self.max_staleness}; please report this with the run's trajectories"
            )
        return {
            "asynchrony/staleness_mean": sums / tokens if tokens else 0.0,
            "asynchrony/staleness_max": float(worst),
        }
