"""Dynamic sampling: replaces groups without a signal by further prompts or by copies."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil

from skyrl_mega.algorithms.filters import with_copies
from skyrl_mega.batch.signal import compared_rewards, rewards_differ
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.derived import ROUNDING
from skyrl_mega.config.schema import AlgorithmConfig, DynamicSamplingConfig
from skyrl_mega.trajectories.trajectory import Group, Status, Trajectory


@dataclass
class GroupSelection:
    """The groups selected for a step, filled round by round."""

    algorithm: AlgorithmConfig
    wanted: int
    """Number of groups needed by the step."""
    informative: list[Group] = field(default_factory=list)
    """Groups with a signal, in sampling order."""
    sampled: int = 0
    """Number of all sampled groups."""
    rounds: int = 0
    """Number of finished rounds of sampling."""

    @property
    def settings(self) -> DynamicSamplingConfig:
        """The settings of dynamic sampling."""
        return self.algorithm.dynamic_sampling

    @property
    def complete(self) -> bool:
        """True if no further round is needed: enough groups have a signal. Enough is `wanted`, or with the mode
        `replace` the share `replace_from` of `wanted`, and at least one group."""
        share = self.settings.replace_from if self.settings.mode == "replace" else 1.0
        return len(self.informative) > 0 and len(self.informative) / self.wanted >= share

    def prompts_to_sample(self, remaining: int) -> int:
        """Returns the number of prompts for the next round: the missing groups times `oversample`, rounded up, at most
        the `remaining` unused prompts of the data. Exceeds `remaining` if the data cannot even supply the missing
        groups."""
        missing = self.wanted - len(self.informative)
        return max(missing, min(remaining, ceil(self.settings.oversample * missing - ROUNDING)))

    def add(self, groups: list[Group]) -> None:
        """Counts a finished round and all its groups, and keeps the groups that have a signal (`with_signal`).

        Raises:
            UserError: A completed trajectory lacks the reward named by `algorithm.dynamic_sampling.reward`. The round
                is counted, but no group of the round is kept.
        """
        self.rounds += 1
        self.sampled += len(groups)
        self.informative += with_signal(groups, self.algorithm)

    def groups(self, seed: list[int]) -> list[Group]:
        """Returns the groups for training: at most `wanted` groups with a signal (rewards that differ). With the mode
        `replace`, once enough groups have a signal (`complete`), copies of random groups of the list fill the list up
        to `wanted`. [] if no group has a signal.

        Args:
            seed: Seed for the choice of copies.
        """
        taken = self.informative[: self.wanted]
        if self.settings.mode == "filter" or not self.complete:
            return taken
        return [taken[i] for i in with_copies(len(taken), self.wanted, seed)]

    def metrics(self, groups: list[Group]) -> dict[str, float]:
        """Returns the metrics of a step trained on `groups`: `rollout/rounds`, `rollout/groups_left_out` (without a
        signal) and `rollout/groups_missing`; in mode `replace` also `rollout/groups_copied`; with `oversample` above 1
        also `rollout/groups_surplus`."""
        informative = len(self.informative)
        metrics = {
            "rounds": self.rounds,
            "groups_left_out": self.sampled - informative,
            "groups_missing": self.wanted - len(groups),
        }
        if self.settings.mode == "replace":
            metrics["groups_copied"] = len(groups) - min(informative, self.wanted)
        if self.settings.oversample > 1:
            metrics["groups_surplus"] = max(0, informative - self.wanted)
        return {f"rollout/{name}": float(value) for name, value in metrics.items()}


def with_signal(groups: list[Group], algorithm: AlgorithmConfig) -> list[Group]:
    """Returns the groups, in order, with rewards that differ by more than `algorithm.dynamic_sampling.tolerance`.
    Samples with failed environments do not count.

    Raises:
        UserError: A completed trajectory lacks the reward named by `algorithm.dynamic_sampling.reward`.
    """
    name, tolerance = algorithm.dynamic_sampling.reward, algorithm.dynamic_sampling.tolerance
    informative = []
    for group in groups:
        judged = [t for t in group.trajectories if not t.status.failed]
        rewards = compared_rewards(judged, algorithm) if name is None else [_named_rewards(judged, name)]
        if rewards_differ(rewards, tolerance):
            informative.append(group)
    return informative


def _named_rewards(judged: list[Trajectory], name: str) -> list[float]:
    """Returns the named reward of each trajectory; 0 for a truncated trajectory without this reward."""
    for t in judged:
        if t.status is Status.COMPLETED and name not in t.rewards:
            names = ", ".join(sorted(t.rewards)) or "none by name"
            raise UserError(
                f"environment {t.prompt.env_class} completed a trajectory without this reward (its "
                f"rewards: {names}); give a reward that every answer gets, even if 0, or null for the whole reward",
                key="algorithm.dynamic_sampling.reward",
                value=name,
            )
    return [t.rewards.get(name, 0.0) for t in judged]
