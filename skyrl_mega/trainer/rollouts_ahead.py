"""What the loop asks of its rollouts, whether they are generated when they are wanted or ahead of that.

A version is the number of the step whose sync brought the weights: step n trains, and changes, version n - 1 where
every step has a sync. What is generated ahead is of older versions, its staleness is the difference.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from skyrl_mega.rollout.trajectory import Group, Trajectory
from skyrl_mega.trainer.step import Step


class Rollouts(Protocol):
    """Groups of trajectories, step by step."""

    def next_groups(self, step: Step) -> list[Group]:
        """What a step learns from; `step` gets all trajectories that were drawn for it, and metrics."""

    def before_sync(self, step: Step) -> None:
        """The step's weights are about to go to the engines, or others to use them alone."""

    def synced(self, version: int) -> None:
        """The engines have these weights, apart from those that failed; also after a sync of no step."""

    def prompts_left(self, done: int) -> int:
        """Prompts that the steps after `done` may still have."""

    def keep(self, folder: Path, done: int) -> None:
        """Writes what no step up to `done` has learned from, and the place in the data, into a checkpoint."""

    def restore(self, folder: Path) -> str:
        """Takes in what `keep` has written, if it has, also in another mode; says what it took, or discarded, and why.
        Nothing where nothing was there."""

    def close(self) -> None:
        """Nothing is generated any more."""


class StaleTooFar(RuntimeError):
    """A step was about to train on tokens of older weights than `asynchrony.max_staleness` allows: a defect."""


@dataclass
class Versions:
    """Which weights the engines have had, so that staleness counts syncs: a step without groups has none.

    Args:
        most: `asynchrony.max_staleness`.
    """

    most: int
    known: list[int] = field(default_factory=list)
    """The newest last, as many as can be told apart."""

    @property
    def newest(self) -> int:
        """What the engines have, and the policy trains."""
        return self.known[-1]

    def add(self, version: int) -> None:
        """The engines have these weights now."""
        if version not in self.known:
            self.known = [*self.known, version][-self.most - 2 :]

    def behind(self, version: int) -> int:
        """How many syncs ago the engines had these weights for the last time."""
        return sum(known > version for known in self.known)

    def measure(self, trajectories: Iterable[Trajectory]) -> dict[str, float]:
        """`asynchrony/staleness_*` of tokens that are about to be trained on.

        Raises:
            StaleTooFar: One is too old.
        """
        tokens = sums = worst = 0
        for t in trajectories:
            for (version, _), count in zip(t.versions, t.tokens_by_version(), strict=True):
                behind = self.behind(version)
                tokens, sums, worst = tokens + count, sums + count * behind, max(worst, behind)
        if worst > self.most:
            raise StaleTooFar(
                f"a step has tokens of weights that are {worst} syncs old, asynchrony.max_staleness is {self.most}; "
                "please report this with the run's trajectories"
            )
        return {
            "asynchrony/staleness_mean": sums / tokens if tokens else 0.0,
            "asynchrony/staleness_max": float(worst),
        }
