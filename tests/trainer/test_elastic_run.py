"""A real run whose engines change: an engine joins by the command and the first leaves; then the run is resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from skyrl_mega.telemetry import events
from skyrl_mega.trainer.engine_requests import read_state
from tests.trainer import quickstart

SETTINGS = [
    *quickstart.LEARNS,
    "run.steps=2000",
    "run.patience=null",
    "checkpoint.every=0",
    "evaluation.every=0",
    "evaluation.before=false",
    "rollout.elastic.most=2",
    "rollout.elastic.grace_s=30",
    "asynchrony.mode=full",
    "telemetry.trajectories_every=0",
]


def command(*words: object) -> str:
    """Runs the command for engines and returns the output."""
    line = [sys.executable, "-m", "skyrl_mega.engines", *map(str, words)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def wait(run: subprocess.Popen[str], lines: list[str], condition: Callable[[], object], seconds: float = 400) -> None:
    """Waits until a condition holds while the run lives."""
    until = time.monotonic() + seconds
    while not condition():
        assert run.poll() is None, "".join(lines)
        assert time.monotonic() < until, "".join(lines[-100:])
        time.sleep(0.5)


def rows(folder: Path) -> list[dict[str, float]]:
    """Returns the rows of metrics so far."""
    file = folder / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def state_of(folder: Path, rank: int) -> str:
    engines = read_state(folder)["engines"] if (folder / "engines" / "state.json").exists() else []
    return next((engine["state"] for engine in engines if engine["rank"] == rank), "")


@pytest.mark.slow
@pytest.mark.nightly
def test_engines_join_and_leave_while_a_run_trains(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run, lines = quickstart.start(tmp_path, "run.name=run", *SETTINGS), list[str]()
    assert run.stdout is not None
    reader = threading.Thread(target=lines.extend, args=[run.stdout])  # a full pipe would stop the run
    reader.start()
    try:
        wait(run, lines, lambda: rows(folder))
        assert "engine-1 starts" in command("add", folder)
        wait(run, lines, lambda: state_of(folder, 1) == "serving")
        assert "engine-0 gets no more requests" in command("remove", folder, 0)
        wait(run, lines, lambda: state_of(folder, 0) == "gone")
        assert "serving" in command("list", folder)
        alone = len(rows(folder)) + 2
        wait(run, lines, lambda: len(rows(folder)) >= alone)
        os.kill(run.pid, signal.SIGUSR1)
        assert run.wait(timeout=300) == 75, "".join(lines)
    finally:
        if run.poll() is None:
            os.kill(run.pid, signal.SIGTERM)
        run.wait(timeout=60)
        reader.join(timeout=60)
    before = len(rows(folder))
    quickstart.finish(tmp_path, "run.name=run", *SETTINGS, f"run.steps={before + 2}")
    kinds = [event.kind for event in events.read(folder)]
    assert kinds.count("engine_joined") == kinds.count("engine_left") == kinds.count("resumed") == 1
    assert not {"actor_lost", "actor_given_up", "fault"} & {*kinds}
    steps = rows(folder)
    assert [row["step"] for row in steps] == [*range(1, before + 3)], "each step once"
    engines = [row["sync/engines"] for row in steps]
    assert {*engines} == {1.0, 2.0} and engines[-1] == 1.0
    assert all(row["asynchrony/staleness_max"] <= 1 for row in steps)
    # The first steps move the policy most, so that a version more makes a larger difference there.
    changed = [row["mismatch/logprob_abs_mean"] for row in steps if row["sync/engines_joined"]]
    assert max(changed) < 0.01, "the joined engine has the policy's weights"
