"""A run killed in the middle of a step and resumed ends like an uninterrupted run."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from skyrl_mega.telemetry.metrics import read
from tests.trainer import quickstart

SETTINGS = ("run.steps=4", "checkpoint.every=2", "evaluation.every=2", "checkpoint.export=true")
CLOCK = ("time/", "perf/", "memory/", "idle/")


def figures(folder: Path) -> list[dict[str, Any]]:
    """Returns all rows without times."""
    rows = read(folder / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith(CLOCK)} for row in rows]


def wait_for_row(folder: Path, step: int, process: Any, timeout: float = 600) -> None:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        file = folder / "metrics.jsonl"
        if file.exists() and any(row["step"] == step for row in read(file)):
            return
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    raise TimeoutError(f"no row of step {step} within {timeout} s")


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_killed_and_resumed_equals_never_killed(tmp_path: Path) -> None:
    quickstart.finish(tmp_path, "run.name=whole", *SETTINGS)

    process = quickstart.start(tmp_path, "run.name=killed", *SETTINGS)
    wait_for_row(tmp_path / "killed", 3, process)  # step 3 is done, past the checkpoint of step 2; step 4 is running
    process.send_signal(signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 60
    while quickstart.left_over(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert quickstart.left_over(tmp_path) == []

    out = quickstart.finish(tmp_path, "run.name=killed", *SETTINGS)
    assert "resuming after step 2" in out
    assert figures(tmp_path / "killed") == figures(tmp_path / "whole")
    assert quickstart.differing(*(quickstart.exported(tmp_path / name) for name in ("killed", "whole"))) == []
    assert quickstart.left_over(tmp_path) == []
