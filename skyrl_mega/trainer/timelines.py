"""`telemetry.timeline`: activity of every engine, environment slot and policy rank over time, a small file per step."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from skyrl_mega.cluster.temporary_files import write_whole
from skyrl_mega.telemetry import step_timeline
from skyrl_mega.telemetry.step_timeline import StepTimeline
from skyrl_mega.telemetry.timeline import Timeline
from skyrl_mega.telemetry.trace import Span
from skyrl_mega.trainer.step import Step


class Timelines:
    """Writes the timeline of each step.

    Args:
        folder: The run's folder.
        timeline: Receives the activity of engines and environments.
        engines: Returns the number of engines, and the numbers of engines out of service.
        slots: Largest number of concurrent environment calls.
    """

    def __init__(
        self, folder: Path, timeline: Timeline, *, engines: Callable[[], tuple[int, list[int]]], slots: int
    ) -> None:
        self.folder, self.timeline, self.engines, self.slots = folder / step_timeline.FOLDER, timeline, engines, slots

    def end(self, step: Step) -> dict[str, float]:
        """Writes the timeline file of a finished step, replacing an earlier one, with the activity recorded since the
        last call, and returns the metrics `idle/*`: shares of time without work. Raises OSError if the file cannot be
        written."""
        timeline = self._timeline_of(step)
        self.folder.mkdir(exist_ok=True)
        write_whole(self.folder / step_timeline.file_name(step.number), timeline.dumps())
        return timeline.idle()

    def _timeline_of(self, step: Step) -> StepTimeline:
        recorded = self.timeline.take()
        count, out = self.engines()
        start, phases = recorded.end - (time.perf_counter() - step.start), list(step.spans)
        shown = start
        if checkpoint := step.metrics.get("time/checkpoint"):  # written between the previous step and this one
            shown = max(recorded.start, start - checkpoint)
            phases = [Span("checkpoint", shown, start), *phases]
        engines = step_timeline.engine_series(recorded.engines, count, shown, recorded.end)
        idle = [engine for engine in out if not engines[engine].busy_s(shown, recorded.end)]
        return StepTimeline(
            step=step.number,
            shown=shown,
            start=start,
            end=recorded.end,
            phases=phases,
            engines=engines,
            environments=recorded.environments.between(shown, recorded.end),
            slots=self.slots,
            absent=idle if len(idle) < count else (),
        )
