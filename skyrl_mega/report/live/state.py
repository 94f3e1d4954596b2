"""The state of a run under way: progress, alarms, and seconds without news."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from skyrl_mega.report.run_data import RunData
from skyrl_mega.telemetry.events import EventLine
from skyrl_mega.telemetry.table import duration

RECENT_STEPS = 10
"""Number of steps for which a finding remains an alarm; the run repeats the line of a lasting finding as often."""
USUAL_STEPS = 20
"""Number of newest steps behind the usual duration of a step."""
SILENT_FACTOR, SILENT_S = 3.0, 120.0
"""A run is silent after this multiple of its longest step without an event, and at least these seconds."""
PHASES = {
    **dict.fromkeys(("started", "stage", "stage_done", "placed", "resumed"), "starting"),
    **{"step": "training", "restart": "restarting", "fault": "fault"},
}
"""Kind of event → phase of the run afterwards."""
START_SILENT_S = 1800.0
"""Seconds without an event until a run without a finished step is silent; loading a large model takes minutes."""


@dataclass(frozen=True)
class Alarm:
    """A finding, a fault or a silence, for the top of the page."""

    kind: str
    """`fault`, `silent`, `actor_given_up`, `retriever_lost`, or the name of a finding."""
    text: str
    level: str
    """`bad` for a fault or a standstill, `warn` for a finding of the newest step, `past` for an earlier finding."""
    steps: tuple[int, int] | None = None
    """First and last step with the finding."""


@dataclass(frozen=True)
class RunState:
    """Progress and alarms of a run, as read from the folder."""

    name: str
    step: int
    planned: int | None
    phase: str
    """`starting`, `training`, `restarting`, `fault` or `ended`."""
    stage: str
    """Last line about the start; empty once a step is finished."""
    news_at: float
    """Time of the last event, or of the newest start, in seconds since 1970."""
    usual_s: float | None
    """Median seconds of the newest `USUAL_STEPS` steps; None before the first step."""
    longest_s: float | None
    """Seconds of the longest step; None before the first step."""
    running: bool
    """False after the end of the run."""
    alarms: tuple[Alarm, ...]

    def at(self, now: float) -> dict[str, Any]:
        """Returns the content of `/state.json`: `name`, `step`, `planned`, `phase`, `running`, `stage`, `age_s`
        (seconds since the last news), `usual_s` and `alarms`, with a first alarm added if a running run without a fault
        has been silent for longer than usual.

        Args:
            now: Present time in seconds since 1970.
        """
        age_s = max(0.0, now - self.news_at)
        alarms = [*self.alarms]
        if self.running and self.phase != "fault" and age_s > self._patience_s:
            usual = f"a step usually takes {duration(self.usual_s)}" if self.usual_s else "no step is finished yet"
            alarms.insert(0, Alarm("silent", f"nothing happened for {duration(age_s)}; {usual}", "bad"))
        return {
            "name": self.name,
            "step": self.step,
            "planned": self.planned,
            "phase": self.phase,
            "running": self.running,
            "stage": self.stage,
            "age_s": round(age_s, 1),
            "usual_s": self.usual_s and round(self.usual_s, 1),
            "alarms": [vars(alarm) for alarm in alarms],
        }

    @property
    def _patience_s(self) -> float:
        return START_SILENT_S if self.longest_s is None else max(SILENT_S, SILENT_FACTOR * self.longest_s)


def state_of(run: RunData, running: bool) -> RunState:
    """Returns progress and alarms of a run, as of now; `RunState.at` adds the alarm for a silent run.

    Args:
        run: The run.
        running: False after the end of the run.

    Raises:
        OSError: The running run has no `config.yaml`.
        UserError: The run's events cannot be read.
    """
    began = (run.folder / "config.yaml").stat().st_mtime if running else 0.0  # each start writes the settings again
    seconds = run.values("time/step")
    phase, stage = _phase([event for event in run.events if event.time >= began], running)
    return RunState(
        name=run.name,
        step=run.steps,
        planned=run.planned,
        phase=phase,
        stage=stage,
        news_at=max(began, run.events[-1].time if run.events else 0.0),
        usual_s=statistics.median(seconds[-USUAL_STEPS:]) if seconds else None,
        longest_s=max(seconds, default=None),
        running=running,
        alarms=tuple(_alarms(run, phase, began)),
    )


def _alarms(run: RunData, phase: str, began: float) -> list[Alarm]:
    """Returns the alarms of a run, the worst first: the fault at the run's end, actors and a retrieval service
    without a restart since the newest start, findings of the last steps."""
    alarms = []
    if run.fault and phase == "fault":
        alarms.append(Alarm("fault", run.fault.text.partition("\n")[0], "bad"))
    lost = [event for event in run.given_up if event.time >= began]
    alarms += [Alarm(event.kind, event.text.partition("\n")[0], "bad") for event in lost]
    findings = [finding for finding in run.findings if finding.steps[-1] > run.steps - RECENT_STEPS]
    for finding in sorted(findings, key=lambda finding: -finding.steps[-1]):
        level = "warn" if finding.steps[-1] >= run.steps else "past"
        alarms.append(Alarm(finding.kind, finding.text, level, (finding.steps[0], finding.steps[-1])))
    return alarms


def _phase(events: Sequence[EventLine], running: bool) -> tuple[str, str]:
    """Returns the phase of a run and the last line about the start.

    Args:
        events: Events since the newest start.
        running: False after the end of the run.
    """
    told = next((event for event in reversed(events) if event.kind in PHASES), None)
    phase = PHASES[told.kind] if told else "starting"
    if not running and phase != "fault":
        return "ended", ""
    return phase, told.text if told and phase in ("starting", "restarting") else ""
