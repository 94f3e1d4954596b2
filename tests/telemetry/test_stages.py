"""Stages of a start, as lines and as events."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from skyrl_mega.telemetry import console as console_module
from skyrl_mega.telemetry import stages as module
from skyrl_mega.telemetry.console import Console
from skyrl_mega.telemetry.stages import Stages


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Replaces the clock of the stages; `now` is the time in seconds."""
    clock = SimpleNamespace(now=100.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(module, "time", clock)
    return clock


def rows(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def test_every_group_says_its_stage_the_missing_actors_and_the_time(clock: SimpleNamespace) -> None:
    stages = Stages()
    with stages.stage("engine", "load the model", 4) as engines:
        engines(["engine-0", "engine-1", "engine-2", "engine-3"])
        clock.now += 30
        with stages.stage("policy", "load weights", 8) as policy:
            engines(["engine-2"])
            policy(["policy-1", "policy-5", "policy-7"])
            clock.now += 15
            assert stages.text() == (
                "engine: load the model 3/4 for 45.0 s (engine-2) · "
                "policy: load weights 5/8 for 15.0 s (policy-1, policy-5 …)"
            )
        assert "policy" not in stages.text()
    assert stages.text() == ""


def test_stages_are_events_and_a_failed_stage_has_no_end(tmp_path: Path, clock: SimpleNamespace) -> None:
    with Console(io.StringIO()) as console:
        console.events_to(tmp_path)
        stages = Stages(console)
        with stages.phase("start"), stages.stage("engine", "load the model", 2):
            clock.now += 2.5
        with pytest.raises(RuntimeError), stages.stage("policy", "load weights", 8):
            raise RuntimeError
    facts = [(row["kind"], row["actors"], row["stage"], row["count"], row.get("seconds")) for row in rows(tmp_path)]
    assert facts == [
        ("stage", "driver", "start", 0, None),
        ("stage", "engine", "load the model", 2, None),
        ("stage_done", "engine", "load the model", 2, 2.5),
        ("stage_done", "driver", "start", 0, 2.5),
        ("stage", "policy", "load weights", 8, None),
    ]


def test_a_long_start_is_not_silent_and_a_long_stage_leaves_a_line(
    monkeypatch: pytest.MonkeyPatch, clock: SimpleNamespace
) -> None:
    monkeypatch.setattr(console_module, "QUIET_S", 0.0)
    out = io.StringIO()
    with Console(out) as console:
        stages = Stages(console)
        with console.phase("start") as phase, stages.stage("engine", "load the model", 2) as waiting:
            waiting(["engine-1"])
            clock.now += 60
            phase.describe(stages.text())
    lines = out.getvalue().splitlines()
    assert lines[0] == "start …" and lines[1].startswith("start, ")
    assert lines[1].endswith(": engine: load the model 1/2 for 1 min 0 s (engine-1)")
    assert lines[2] == "engine: load the model took 1 min 0 s"
