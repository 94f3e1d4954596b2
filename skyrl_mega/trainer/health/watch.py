"""Runs all watchers after every step: decides on messages, metrics, and the end of a run unable to learn."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import ceil

from skyrl_mega.config.schema import Config
from skyrl_mega.rollout.trajectory import Trajectory
from skyrl_mega.trainer.health import mismatch, rollouts, training
from skyrl_mega.trainer.health.seen import ONSET, SPEED, USUAL, Finding, Row, Seen

PREFIX = "health: "
"""Prefix of lines about findings."""
AGAIN = 10
"""Steps before a finding of the same kind is printed again."""
KEPT = USUAL + ONSET + 28
"""Number of remembered rows."""
FIRST = 10
"""Number of rows taken as the run's start."""
STUCK, STUCK_GROUPS = "health/stuck_steps", "health/stuck_groups"
"""Metrics counting the latest consecutive steps, and groups, without anything learned."""


class CannotLearn(RuntimeError):
    """The policy learned nothing during `run.patience` steps with `run.patience_groups` groups."""


@dataclass(frozen=True)
class Verdict:
    """The result of the health checks of a step."""

    metrics: dict[str, float]
    """Metrics `health/…` for the step's row."""
    lines: list[str]
    """Lines for the console."""
    stuck: int
    """Number of latest consecutive steps without anything learned."""


@dataclass
class Health:
    """The run's memory of metrics and findings."""

    config: Config
    past: deque[Row] = field(default_factory=lambda: deque(maxlen=KEPT))
    first: list[Row] = field(default_factory=list)
    stuck: int = 0
    groups: int = 0
    """Groups in the stuck steps, up to `run.patience_groups`. A step not explained by bad luck counts as the full
    number."""
    said: dict[str, int] = field(default_factory=dict)
    """Kind → last step with a printed line."""
    told: dict[str, str] = field(default_factory=dict)
    """Kind → newest evidence."""

    def remember(self, rows: Iterable[Row]) -> None:
        """Reads earlier steps from rows of metrics.jsonl, so that a resumed run continues the counts. A run that ended
        for lack of patience starts with full patience again."""
        for row in rows:
            if row.get("step"):
                self._keep(row)
        newest = self.past[-1] if self.past else {}
        self.stuck, self.groups = (int(newest.get(name) or 0) for name in (STUCK, STUCK_GROUPS))
        if self._out_of_patience:
            self.stuck = self.groups = 0

    def see(self, number: int, metrics: Row, trajectories: Sequence[Trajectory]) -> Verdict:
        """Checks a finished step and returns the verdict."""
        seen = Seen(self.config, number, metrics, trajectories, tuple(self.past), tuple(self.first))
        measured = {**seen.shares(), **(_speed(metrics) if self.config.asynchrony.mode == "off" else {})}
        seen = Seen(self.config, number, {**metrics, **measured}, trajectories, seen.past, seen.first)
        found = findings(seen)
        self._count(seen, [finding for finding in found if finding.stuck])
        measured |= {f"health/{finding.kind}": 1.0 for finding in found}
        measured |= {STUCK: float(self.stuck), STUCK_GROUPS: float(self.groups)}
        self._keep({**metrics, **measured})
        self.told |= {finding.kind: finding.text for finding in found if finding.stuck}
        lines = [self._line(seen, finding) for finding in found if self._is_news(number, finding)]
        return Verdict(measured, lines, self.stuck)

    def end_if_stuck(self, number: int) -> None:
        """Ends the run if nothing was learned for `run.patience` steps with `run.patience_groups` groups.

        Raises:
            CannotLearn: Gives the reasons.
        """
        if self._out_of_patience:
            why = "; ".join(
                f"{kind}: {text}" for kind, text in self.told.items() if self.past[-1].get(f"health/{kind}")
            )
            run = self.config.run
            steps = f"step {number} was" if self.stuck == 1 else f"the last {self.stuck} steps up to {number} were each"
            raise CannotLearn(
                f"{steps} one from which the policy cannot learn (run.patience = {run.patience}, run.patience_groups = "
                f"{run.patience_groups}): {why}; docs/health.md says what helps"
            )

    @property
    def _out_of_patience(self) -> bool:
        run = self.config.run
        return bool(run.patience) and self.stuck >= (run.patience or 0) and self.groups >= run.patience_groups

    def _count(self, seen: Seen, stuck: list[Finding]) -> None:
        if not stuck:
            self.stuck = self.groups = 0
            return
        enough = self.config.run.patience_groups
        self.stuck += 1
        self.groups = min(enough, self.groups + (seen.compared if all(f.luck for f in stuck) else enough))

    def _keep(self, row: Row) -> None:
        self.past.append(row)
        if len(self.first) < FIRST:
            self.first.append(row)

    def _is_news(self, number: int, finding: Finding) -> bool:
        last = self.said.get(finding.kind)
        if last is not None and number - last < AGAIN:
            return False
        self.said[finding.kind] = number
        return True

    def _line(self, seen: Seen, finding: Finding) -> str:
        run, left = self.config.run, 0
        if run.patience:
            missing = run.patience_groups - self.groups
            left = max(run.patience - self.stuck, ceil(missing / max(1, seen.compared)))
        ends = (
            f"; the run ends after {left} more such step{'s' if left > 1 else ''}" if finding.stuck and left > 0 else ""
        )
        return f"{PREFIX}step {seen.number}: {finding.kind}: {finding.text}{ends}"


def findings(seen: Seen) -> list[Finding]:
    """Returns the findings of all watchers in a step, except findings implied by another finding."""
    watchers = (*rollouts.WATCHERS, *training.WATCHERS, *mismatch.WATCHERS)
    found = [finding for watcher in watchers if (finding := watcher(seen))]
    explained = {kind for finding in found for kind in finding.explains}
    return [finding for finding in found if finding.kind not in explained]


def _speed(metrics: Row) -> dict[str, float]:
    tokens, seconds = metrics.get("rollout/tokens"), metrics.get("time/generate")
    return {SPEED: tokens / seconds} if tokens and seconds else {}
