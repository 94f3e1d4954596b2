"""Runs all watchers after every step: decides on messages, metrics, and the end of a run unable to learn."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import ceil

from skyrl_mega.cluster.errors import Fault
from skyrl_mega.config.schema import Config
from skyrl_mega.telemetry.events import Event
from skyrl_mega.trainer.health import mismatch, rollouts, training
from skyrl_mega.trainer.health.step_view import ONSET_STEPS, SPEED, USUAL_STEPS, Finding, Row, StepView
from skyrl_mega.trajectories.trajectory import Trajectory

PREFIX = "health: "
"""Prefix of lines about findings."""
REPEAT_AFTER = 10
"""Steps before a finding of the same kind is printed again."""
KEPT_ROWS = USUAL_STEPS + ONSET_STEPS + 28
"""Number of remembered rows."""
FIRST_ROWS = 10
"""Number of rows taken as the run's start."""
STUCK, STUCK_GROUPS = "health/stuck_steps", "health/stuck_groups"
"""Metrics counting the latest consecutive steps, and groups, without anything learned."""


class CannotLearn(Fault):
    """The policy learned nothing during `run.patience` steps with `run.patience_groups` groups."""


@dataclass(frozen=True)
class Verdict:
    """The result of the health checks of a step."""

    metrics: dict[str, float]
    """Metrics `health/…` for the step's row."""
    lines: list[Event]
    """Lines for the console."""
    stuck: int
    """Number of latest consecutive steps without anything learned."""


@dataclass
class Health:
    """The health checks of a run: remembers metrics and findings, and counts steps without anything learned."""

    config: Config
    past: deque[Row] = field(default_factory=lambda: deque(maxlen=KEPT_ROWS))
    """Metrics of the latest steps, at most `KEPT_ROWS`."""
    first: list[Row] = field(default_factory=list)
    """Metrics of the run's first `FIRST_ROWS` steps."""
    stuck: int = 0
    """Number of latest consecutive steps without anything learned."""
    groups: int = 0
    """Groups in the stuck steps, up to `run.patience_groups`. A step not explained by bad luck counts as the full
    number."""
    last_printed: dict[str, int] = field(default_factory=dict)
    """Kind → last step with a printed line."""
    evidence: dict[str, str] = field(default_factory=dict)
    """Kind → newest evidence."""

    def remember(self, rows: Iterable[Row]) -> None:
        """Adds the metrics of earlier steps, rows of metrics.jsonl, to the remembered metrics, so that a resumed run
        continues the counts. The rows are in order of steps; rows of step 0 are skipped. After a run that ended for
        lack of patience, the counts start at 0."""
        for row in rows:
            if row.get("step"):
                self._remember_row(row)
        newest = self.past[-1] if self.past else {}
        self.stuck, self.groups = (int(newest.get(name) or 0) for name in (STUCK, STUCK_GROUPS))
        if self._out_of_patience:
            self.stuck = self.groups = 0

    def check(self, number: int, metrics: Row, trajectories: Sequence[Trajectory]) -> Verdict:
        """Checks a finished step and returns the verdict: metrics, lines about new findings, and the number of steps in
        a row without learning. Raises nothing for a finding; `end_if_stuck` ends the run. Remembers the step for later
        checks, so each step is checked once.

        Args:
            number: The step's number.
            metrics: The step's metrics.
            trajectories: The step's trajectories.
        """
        view = StepView(self.config, number, metrics, trajectories, tuple(self.past), tuple(self.first))
        measured = {**view.shares(), **(_speed(metrics) if self.config.asynchrony.mode == "off" else {})}
        view = StepView(self.config, number, {**metrics, **measured}, trajectories, view.past, view.first)
        found_now = findings(view)
        self._count_stuck(view, [finding for finding in found_now if finding.stuck])
        measured |= {f"health/{finding.kind}": 1.0 for finding in found_now}
        measured |= {STUCK: float(self.stuck), STUCK_GROUPS: float(self.groups)}
        self._remember_row({**metrics, **measured})
        self.evidence |= {finding.kind: finding.text for finding in found_now if finding.stuck}
        lines = [self._line(view, finding) for finding in found_now if self._is_new(number, finding)]
        return Verdict(measured, lines, self.stuck)

    def end_if_stuck(self, number: int) -> None:
        """Raises an error, which ends the run, if nothing was learned for `run.patience` steps with
        `run.patience_groups` groups, as counted by `check`; never without `run.patience`.

        Raises:
            CannotLearn: Gives the reasons.
        """
        if self._out_of_patience:
            why = "; ".join(
                f"{kind}: {text}" for kind, text in self.evidence.items() if self.past[-1].get(f"health/{kind}")
            )
            run = self.config.run
            steps = f"step {number}" if self.stuck == 1 else f"any of the last {self.stuck} steps up to {number}"
            raise CannotLearn(
                f"the policy cannot learn from {steps} (run.patience = {run.patience}, run.patience_groups = "
                f"{run.patience_groups}): {why}; docs/health.md says what helps"
            )

    @property
    def _out_of_patience(self) -> bool:
        run = self.config.run
        return bool(run.patience) and self.stuck >= (run.patience or 0) and self.groups >= run.patience_groups

    def _count_stuck(self, view: StepView, stuck: list[Finding]) -> None:
        if not stuck:
            self.stuck = self.groups = 0
            return
        full = self.config.run.patience_groups
        self.stuck += 1
        self.groups = min(full, self.groups + (view.group_count if all(f.luck for f in stuck) else full))

    def _remember_row(self, row: Row) -> None:
        self.past.append(row)
        if len(self.first) < FIRST_ROWS:
            self.first.append(row)

    def _is_new(self, number: int, finding: Finding) -> bool:
        last = self.last_printed.get(finding.kind)
        if last is not None and number - last < REPEAT_AFTER:
            return False
        self.last_printed[finding.kind] = number
        return True

    def _line(self, view: StepView, finding: Finding) -> Event:
        run, steps_left = self.config.run, 0
        if run.patience:
            missing_groups = run.patience_groups - self.groups
            steps_left = max(run.patience - self.stuck, ceil(missing_groups / max(1, view.group_count)))
        ending = (
            f"; the run ends after {steps_left} more such step{'s' if steps_left > 1 else ''}"
            if finding.stuck and steps_left > 0
            else ""
        )
        evidence = f"{finding.text}{ending}"
        text = f"{PREFIX}step {view.number}: {finding.kind}: {evidence}"
        return Event("health", text, step=view.number, finding=finding.kind, evidence=evidence)


def findings(view: StepView) -> list[Finding]:
    """Returns the findings of all watchers in a step, except findings implied by another finding."""
    watchers = (*rollouts.WATCHERS, *training.WATCHERS, *mismatch.WATCHERS)
    all_findings = [finding for watcher in watchers if (finding := watcher(view))]
    implied = {kind for finding in all_findings for kind in finding.explains}
    return [finding for finding in all_findings if finding.kind not in implied]


def _speed(metrics: Row) -> dict[str, float]:
    tokens, seconds = metrics.get("rollout/tokens"), metrics.get("time/generate")
    return {SPEED: tokens / seconds} if tokens and seconds else {}
