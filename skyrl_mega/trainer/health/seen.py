"""A step as the watchers see it: its trajectories, its metrics, and the metrics of the steps before."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from statistics import median

from skyrl_mega.algorithms.losses import LOSSES
from skyrl_mega.config.derived import compares_samples
from skyrl_mega.config.schema import Config
from skyrl_mega.rollout.trajectory import Trajectory, policy_texts
from skyrl_mega.trainer.signal import compared, differ

LONGEST = 80
"""Characters of what a policy wrote that are shown."""
USUAL = 20
"""Steps whose median is the usual value of a metric."""
ONSET = 2
"""The newest steps before this one, which the usual value leaves out: what has just begun is not yet usual."""
SPEED = "perf/generate_tokens_per_s"
KNOWN = 5
"""Steps without which nothing is usual."""
NEAR = 3
"""Steps among which two must be far off."""

Row = Mapping[str, float | None]
"""Metrics of a step."""


@dataclass(frozen=True)
class Finding:
    """What a watcher found in a step."""

    kind: str
    """Its name: a metric `health/<kind>`, and a row of docs/health.md."""
    text: str
    """The evidence, on one line: counts, and a sample."""
    stuck: bool = False
    """Whether the policy learns nothing from such a step: `run.patience` counts these."""
    luck: bool = False
    """Whether bad luck may explain it, so that `run.patience_groups` are needed too."""
    explains: tuple[str, ...] = ()
    """Kinds that follow from this one and are not told beside it."""


@dataclass(frozen=True)
class Seen:
    """A step, and what came before it."""

    config: Config
    number: int
    metrics: Row
    trajectories: Sequence[Trajectory]
    """All that were drawn, the samples of a prompt one after another."""
    past: Sequence[Row] = field(default_factory=tuple)
    """Rows of the newest steps before this one, in order."""
    first: Sequence[Row] = field(default_factory=tuple)
    """Rows of the run's first steps."""

    @cached_property
    def judged(self) -> list[Trajectory]:
        """The trajectories whose environment did not fail."""
        return [t for t in self.trajectories if not t.status.failed]

    @cached_property
    def groups(self) -> list[list[Trajectory]]:
        """The judged samples of each prompt, where there are two to compare.

        Where advantages do not compare them (`reinforce`), everything is compared with everything.
        """
        if not compares_samples(self.config.algorithm):
            return [self.judged] if len(self.judged) > 1 else []
        samples = self.config.data.samples_per_prompt
        drawn = [self.trajectories[i : i + samples] for i in range(0, len(self.trajectories), samples)]
        judged = [[t for t in group if not t.status.failed] for group in drawn]
        return [group for group in judged if len(group) > 1]

    @property
    def compared(self) -> int:
        """Groups of the step, each of which may have had something to learn from; answers, where there are none."""
        return len(self.groups or self.judged if compares_samples(self.config.algorithm) else self.judged)

    @property
    def taught(self) -> bool:
        """Whether a token of the step had an advantage, be the rewards of its group equal: lengths, an answer's own
        reward, a critic or KL in the reward give one too. A loss of the user's own need not look at advantages."""
        own = self.config.algorithm.loss not in LOSSES
        return bool(self.figure("policy/advantage_fraction") or (own and self.figure("policy/grad_norm")))

    @property
    def tells_apart(self) -> bool:
        """Whether there was something to learn from: rewards that differ in a group, or an advantage."""
        return self.taught or bool(self.figure("rollout/groups_differ"))

    def shares(self) -> dict[str, float]:
        """Metrics that watchers compare over steps: share of the groups with rewards that differ, with answers that
        differ, and of turns with a stop string in them. Those that cannot be measured are left out."""
        found: dict[str, float] = {}
        if self.groups:
            found["rollout/groups_differ"] = _share(
                differ(compared(group, self.config.algorithm)) for group in self.groups
            )
            found["rollout/answers_differ"] = _share(
                len({tuple(policy_texts(t)) for t in group}) > 1 for group in self.groups
            )
        if turns := self.turns if self.config.rollout.sampling.stop else []:
            found["rollout/stop_strings"] = _share(self.stopped(text) for text in turns)
        return found

    @cached_property
    def turns(self) -> list[str]:
        """What the policy said in every turn of the step."""
        return [text for t in self.judged for text in policy_texts(t)]

    def stopped(self, text: str) -> bool:
        """Whether a turn has one of `rollout.sampling.stop` in it."""
        return any(stop in text for stop in self.config.rollout.sampling.stop)

    def figure(self, name: str) -> float | None:
        """`figure` of this step."""
        return figure(self.metrics, name)

    def usual(self, name: str) -> float | None:
        """The median of a metric over the steps before, zeros left out; None before there are enough."""
        known = [figure(row, name) for row in self.past[: len(self.past) - ONSET]][-USUAL:]
        values = [value for value in known if value and math.isfinite(value)]
        return median(values) if len(values) >= KNOWN else None

    def start(self, name: str) -> float | None:
        """The median of a metric over the run's first steps; None before there are enough."""
        values = [value for row in self.first if (value := figure(row, name)) is not None and math.isfinite(value)]
        return median(values) if len(values) >= KNOWN else None

    def last(self, name: str, steps: int) -> list[float]:
        """A metric of this step and of those before it, the newest first; of so many steps at most that have it."""
        rows = [self.metrics, *reversed(self.past)]
        return [value for row in rows if (value := figure(row, name)) is not None][:steps]

    def lasting(self, name: str, value: float) -> int:
        """For how many steps up to this one, without a break, a metric has had this value."""
        return self.in_a_row(lambda row: figure(row, name) == value)

    def in_a_row(self, holds: Callable[[Row], bool]) -> int:
        """For how many steps up to this one, without a break, something has held."""
        return sum(1 for _ in takewhile(holds, [self.metrics, *reversed(self.past)]))


def shown(text: str, longest: int = LONGEST) -> str:
    """A text on one line, quoted, without characters that a terminal would obey; the end of it where it is long."""
    return f"'{plain(text if len(text) <= longest else '…' + text[-longest:])}'"


def plain(text: str) -> str:
    """A text on one line, with characters that a terminal would obey written out."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def example(t: Trajectory) -> str:
    """What a trajectory's last turn said, what it earned, and what its environment noted."""
    said = next(reversed(list(policy_texts(t))), "")
    noted = {key: value for key, value in t.metadata.items() if key != "tool_calls"}
    note = f", metadata {shown(json.dumps(noted, ensure_ascii=False, default=str)[:LONGEST])}" if noted else ""
    return f"e.g. {shown(said)} earned {t.reward:g}{note}"


def figure(row: Row, name: str) -> float | None:
    """A metric of a row; None where it was not measured. What is not finite is infinite."""
    if name not in row:
        return None
    value = row[name]
    return math.inf if value is None or not math.isfinite(value) else float(value)


def twice(seen: Seen, name: str, far: float, at_all: float) -> bool:
    """Whether a metric is that far off now and once more in the last steps, or by far now."""
    now = seen.figure(name)
    if now is None or now < far:
        return False
    return now >= at_all or sum(value >= far for value in seen.last(name, NEAR)) >= 2


def _share(found: Iterator[bool]) -> float:
    each = list(found)
    return sum(each) / len(each)
