"""A step from the watchers' point of view: trajectories, metrics, and the metrics of earlier steps."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from statistics import median

from skyrl_mega.algorithms.losses import LOSSES
from skyrl_mega.batch.signal import compared_rewards, rewards_differ
from skyrl_mega.common.terminal import printable
from skyrl_mega.config.schema import Config
from skyrl_mega.trajectories.trajectory import Trajectory, policy_texts

SHOWN_CHARS = 80
"""Largest number of characters shown of a policy's text."""
USUAL_STEPS = 20
"""Number of steps for the usual value of a metric, the median."""
ONSET_STEPS = 2
"""Newest earlier steps excluded from the usual value: a change just begun is not usual yet."""
SPEED = "perf/generate_tokens_per_s"
MIN_STEPS = 5
"""Smallest number of steps for a usual value."""
NEAR_STEPS = 3
"""Window of steps in which two must be abnormal."""

Row = Mapping[str, float | None]
"""Metrics of a step."""


@dataclass(frozen=True)
class Finding:
    """An observation of a watcher in a step."""

    kind: str
    """Name: the metric `health/<kind>`, and a row of docs/health.md."""
    text: str
    """Evidence on a single line: counts, and a sample."""
    stuck: bool = False
    """True if the policy learns nothing from such a step; `run.patience` counts these."""
    luck: bool = False
    """True if bad luck may be the reason; then `run.patience_groups` are required, too."""
    explains: tuple[str, ...] = ()
    """Kinds implied by this finding, and therefore suppressed."""


@dataclass(frozen=True)
class StepView:
    """A step and the history before."""

    config: Config
    number: int
    metrics: Row
    trajectories: Sequence[Trajectory]
    """All sampled trajectories, ordered by prompt."""
    past: Sequence[Row] = field(default_factory=tuple)
    """Metrics of the latest earlier steps, in order."""
    first: Sequence[Row] = field(default_factory=tuple)
    """Metrics of the run's first steps."""

    @cached_property
    def judged(self) -> list[Trajectory]:
        """Trajectories without a failed environment."""
        return [t for t in self.trajectories if not t.status.failed]

    @cached_property
    def groups(self) -> list[list[Trajectory]]:
        """The judged samples (without failure of the environment) of each prompt with at least two.

        If advantages do not compare samples (`reinforce`), all trajectories form a single group. [] without a group of
        at least two.
        """
        if not self.config.algorithm.advantage_traits.compares:
            return [self.judged] if len(self.judged) > 1 else []
        samples = self.config.data.samples_per_prompt
        by_prompt = [self.trajectories[i : i + samples] for i in range(0, len(self.trajectories), samples)]
        judged = [[t for t in group if not t.status.failed] for group in by_prompt]
        return [group for group in judged if len(group) > 1]

    @property
    def group_count(self) -> int:
        """Number of groups with a chance of a signal; number of judged trajectories if there are no groups, or if
        advantages do not compare samples."""
        return len(self.groups or self.judged if self.config.algorithm.advantage_traits.compares else self.judged)

    @property
    def has_advantage(self) -> bool:
        """True if any token received a nonzero advantage, even with equal rewards in the group: from lengths, rewards
        of single answers, a critic or KL in the reward. With a user-defined loss a gradient is enough."""
        user_defined = self.config.algorithm.loss not in LOSSES
        return bool(self.metric("policy/advantage_fraction") or (user_defined and self.metric("policy/grad_norm")))

    @property
    def has_signal(self) -> bool:
        """True if there was something to learn: unequal rewards in a group, or an advantage."""
        return self.has_advantage or bool(self.metric("rollout/groups_differ"))

    def shares(self) -> dict[str, float]:
        """Returns three metrics by name: the share of groups with unequal rewards (`rollout/groups_differ`), of groups
        with unequal answers (`rollout/answers_differ`), and of turns with a stop string (`rollout/stop_strings`).
        Without groups the first two are left out; without turns, or without `rollout.sampling.stop`, the third."""
        metrics: dict[str, float] = {}
        if self.groups:
            metrics["rollout/groups_differ"] = _share(
                rewards_differ(compared_rewards(group, self.config.algorithm)) for group in self.groups
            )
            metrics["rollout/answers_differ"] = _share(
                len({tuple(policy_texts(t)) for t in group}) > 1 for group in self.groups
            )
        if turns := self.turns if self.config.rollout.sampling.stop else []:
            metrics["rollout/stop_strings"] = _share(self.contains_stop_string(text) for text in turns)
        return metrics

    @cached_property
    def turns(self) -> list[str]:
        """The policy's text in every turn of the judged trajectories."""
        return [text for t in self.judged for text in policy_texts(t)]

    def contains_stop_string(self, text: str) -> bool:
        """Returns True if a turn contains a string of `rollout.sampling.stop`."""
        return any(stop in text for stop in self.config.rollout.sampling.stop)

    def metric(self, name: str) -> float | None:
        """Returns a metric of this step; None if not measured, infinity if the value was not finite."""
        return metric_of(self.metrics, name)

    def usual(self, name: str) -> float | None:
        """Returns the median of a metric over the last `USUAL_STEPS` earlier steps, without the newest `ONSET_STEPS`,
        and without zeros and values not finite; None with fewer than `MIN_STEPS` values."""
        earlier = [metric_of(row, name) for row in self.past[: len(self.past) - ONSET_STEPS]][-USUAL_STEPS:]
        values = [value for value in earlier if value and math.isfinite(value)]
        return median(values) if len(values) >= MIN_STEPS else None

    def start(self, name: str) -> float | None:
        """Returns the median of a metric over the run's first steps (`first`); None with fewer than `MIN_STEPS` finite
        values."""
        values = [value for row in self.first if (value := metric_of(row, name)) is not None and math.isfinite(value)]
        return median(values) if len(values) >= MIN_STEPS else None

    def last(self, name: str, steps: int) -> list[float]:
        """Returns the newest values of a metric, this step's first; at most `steps` values. Steps without the metric
        are skipped."""
        rows = [self.metrics, *reversed(self.past)]
        return [value for row in rows if (value := metric_of(row, name)) is not None][:steps]

    def steps_with_value(self, name: str, value: float) -> int:
        """Returns the number of consecutive steps, this step and the steps just before, with this value of a metric; 0
        if this step has another value."""
        return self.steps_in_a_row(lambda row: metric_of(row, name) == value)

    def steps_in_a_row(self, holds: Callable[[Row], bool]) -> int:
        """Returns the number of consecutive steps, this step and the steps just before, whose metrics satisfy a
        condition; 0 if this step's metrics do not."""
        return sum(1 for _ in takewhile(holds, [self.metrics, *reversed(self.past)]))


def quoted(text: str) -> str:
    """Returns a text on a single line, quoted and without terminal control characters; of a long text only the end."""
    return f"'{printable(text if len(text) <= SHOWN_CHARS else '…' + text[-SHOWN_CHARS:])}'"


def example(t: Trajectory) -> str:
    """Returns a phrase for a message: "e.g.", the end of the policy's last turn, the reward, and the beginning of the
    environment's metadata without `tool_calls`, if any."""
    last_turn = next(reversed(list(policy_texts(t))), "")
    metadata = {key: value for key, value in t.metadata.items() if key != "tool_calls"}
    note = (
        f", metadata {quoted(json.dumps(metadata, ensure_ascii=False, default=str)[:SHOWN_CHARS])}" if metadata else ""
    )
    return f"e.g. {quoted(last_turn)} earned {t.reward:g}{note}"


def metric_of(row: Row, name: str) -> float | None:
    """Returns a metric of a step's row; None if the row lacks the name, infinity if the value is None or not finite."""
    if name not in row:
        return None
    value = row[name]
    return math.inf if value is None or not math.isfinite(value) else float(value)


def repeatedly_above(view: StepView, name: str, far: float, at_all: float) -> bool:
    """Returns True if a metric is at least `at_all` in this step, or at least `far` in this step and in another of the
    `NEAR_STEPS` newest values, this step's included. False without a value in this step.

    Args:
        view: This step and the steps before.
        name: Name of the metric.
        far: Bound for two steps.
        at_all: Bound for this step alone; at least `far`.
    """
    now = view.metric(name)
    if now is None or now < far:
        return False
    return now >= at_all or sum(value >= far for value in view.last(name, NEAR_STEPS)) >= 2


def _share(flags: Iterator[bool]) -> float:
    values = list(flags)
    return sum(values) / len(values)
