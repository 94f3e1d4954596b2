"""The timeline file of each step, and the measured idle times."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from skyrl_mega.telemetry.console import Console
from skyrl_mega.telemetry.step_timeline import FOLDER, StepTimeline, file_name, loads
from skyrl_mega.telemetry.timeline import Timeline
from skyrl_mega.trainer.step import Step
from skyrl_mega.trainer.timelines import Timelines


def play(step: Step, timeline: Timeline) -> None:
    """Runs a request on one of two engines for 0.4 s, then trains for 0.4 s."""
    with step.phase("generate"):
        timeline.requests(1, 1)
        timeline.calls(1)
        time.sleep(0.4)
        timeline.calls(-1)
        timeline.requests(1, -1)
    with step.phase("train"):
        time.sleep(0.4)


def read(folder: Path, step: int) -> StepTimeline:
    return loads((folder / FOLDER / file_name(step)).read_bytes())


def test_each_step_has_a_file_and_repeats_overwrite_theirs(tmp_path: Path) -> None:
    timeline = Timeline()
    timelines = Timelines(tmp_path, timeline, engines=lambda: (2, []), slots=4)
    timeline.requests(0, 1)  # before the first step: the initial evaluation
    timeline.requests(0, -1)
    for number in (1, 2, 2):
        step = Step(number, Console())
        play(step, timeline)
        metrics = timelines.end(step)
    assert metrics["idle/engines"] == pytest.approx(0.75, abs=0.1), "one does nothing, the other half of the time"
    assert metrics["idle/policy"] == pytest.approx(0.5, abs=0.15)
    assert metrics["idle/environments"] == pytest.approx(1 - 0.5 / 4, abs=0.05)
    assert sorted(file.name for file in (tmp_path / FOLDER).iterdir()) == [file_name(1), file_name(2)]
    first, last = read(tmp_path, 1), read(tmp_path, 2)
    assert last.idle() == pytest.approx(metrics, abs=0.02)
    assert first.end < last.start and first.shown == first.start
    assert first.engines[0].busy_s(0, 1e12) == 0, "what was before the step is not in it"
    assert [span.name for span in last.phases] == ["generate", "train"] and last.synced is None


def test_a_checkpoint_is_shown_before_the_step_that_measures_it(tmp_path: Path) -> None:
    timeline = Timeline()
    timelines = Timelines(tmp_path, timeline, engines=lambda: (1, []), slots=1)
    timeline.requests(0, 1)
    timelines.end(Step(1, Console()))
    time.sleep(0.1)
    step = Step(2, Console(), {"time/checkpoint": 0.06})
    time.sleep(0.05)
    metrics = timelines.end(step)
    step_timeline = read(tmp_path, 2)
    assert [span.name for span in step_timeline.phases] == ["checkpoint"]
    assert step_timeline.start - step_timeline.shown == pytest.approx(0.06, abs=0.005)
    assert metrics["idle/engines"] == pytest.approx(0, abs=1e-3) and metrics["idle/policy"] == 1, (
        "of the step's own time"
    )
    assert step_timeline.engines[0].busy_s(0, 1e12) == pytest.approx(step_timeline.end - step_timeline.shown, abs=0.005)
