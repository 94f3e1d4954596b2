"""Dynamic sampling: groups without a signal leave a step, and others come in their place."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil

from skyrl_mega.algorithms.filters import with_copies
from skyrl_mega.config.derived import ROUNDING
from skyrl_mega.config.errors import UserError
from skyrl_mega.config.schema import AlgorithmConfig, DynamicSamplingConfig
from skyrl_mega.rollout.trajectory import Group, Status, Trajectory
from skyrl_mega.trainer.signal import compared, differ


@dataclass
class Selection:
    """A step's groups, as the rounds bring them."""

    algorithm: AlgorithmConfig
    wanted: int
    """Groups that the step needs."""
    found: list[Group] = field(default_factory=list)
    """Those with a signal, in the order in which they were drawn."""
    drawn: int = 0
    """All groups."""
    rounds: int = 0

    @property
    def settings(self) -> DynamicSamplingConfig:
        """Those of dynamic sampling."""
        return self.algorithm.dynamic_sampling

    @property
    def complete(self) -> bool:
        """Whether no further round is needed."""
        share = self.settings.replace_from if self.settings.mode == "replace" else 1.0
        return len(self.found) > 0 and len(self.found) / self.wanted >= share

    def to_draw(self, remaining: int) -> int:
        """Prompts of the next round, of `remaining` that the data still has; more than these where they are too few
        even for what is missing."""
        missing = self.wanted - len(self.found)
        return max(missing, min(remaining, ceil(self.settings.oversample * missing - ROUNDING)))

    def add(self, groups: list[Group]) -> None:
        """A round that was played."""
        self.rounds += 1
        self.drawn += len(groups)
        self.found += with_signal(groups, self.algorithm)

    def groups(self, seed: list[int]) -> list[Group]:
        """What the step learns from: at most `wanted`, filled with copies where the mode says so.

        Args:
            seed: Of which groups are copied.
        """
        taken = self.found[: self.wanted]
        if self.settings.mode == "filter" or not self.complete:
            return taken
        return [taken[i] for i in with_copies(len(taken), self.wanted, seed)]

    def metrics(self, groups: list[Group]) -> dict[str, float]:
        """`rollout/…` of a step that learns from `groups`."""
        found = len(self.found)
        metrics = {
            "rounds": self.rounds,
            "groups_left_out": self.drawn - found,
            "groups_missing": self.wanted - len(groups),
        }
        if self.settings.mode == "replace":
            metrics["groups_copied"] = len(groups) - min(found, self.wanted)
        if self.settings.oversample > 1:
            metrics["groups_surplus"] = max(0, found - self.wanted)
        return {f"rollout/{name}": float(value) for name, value in metrics.items()}


def with_signal(groups: list[Group], algorithm: AlgorithmConfig) -> list[Group]:
    """The groups whose samples earned rewards that differ, but for those of environments that failed.

    Raises:
        UserError: `algorithm.dynamic_sampling.reward` is none of an environment's rewards.
    """
    name, tolerance = algorithm.dynamic_sampling.reward, algorithm.dynamic_sampling.tolerance
    found = []
    for group in groups:
        judged = [t for t in group.trajectories if not t.status.failed]
        rewards = compared(judged, algorithm) if name is None else [_named(judged, name)]
        if differ(rewards, tolerance):
            found.append(group)
    return found


def _named(judged: list[Trajectory], name: str) -> list[float]:
    """One reward of each trajectory; 0 for one that a budget ended before it earned any."""
    for t in judged:
        if t.status is Status.COMPLETED and name not in t.rewards:
            names = ", ".join(sorted(t.rewards)) or "none by name"
            raise UserError(
                f"algorithm.dynamic_sampling.reward = {name}: environment {t.prompt.env_class} completed a trajectory "
                f"without it (its rewards: {names}); give one that every answer earns, be it 0, or null"
            )
    return [t.rewards.get(name, 0.0) for t in judged]
