"""A policy rank killed while its state is offloaded: the run resumes from the newest checkpoint."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from skyrl_mega.telemetry.metrics import read
from tests.trainer import paused, quickstart
from tests.trainer.test_resume import wait_for_row

SETTINGS = (
    "run.name=run",
    "run.steps=3",
    "run.deterministic=true",
    "checkpoint.every=1",
    "evaluation.before=false",
    "evaluation.every=3",
    "warmup.steps=0",
    "algorithm.dynamic_sampling.enabled=false",
    "residency.keep=[]",
    f"environment.classes.addition={quickstart.ROOT}/tests/trainer/paused.py:Paused",
)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_rank_that_is_killed_while_its_state_is_parked(tmp_path: Path) -> None:
    """Kills a rank while a step generates and the policy's state lies in host memory. The crash shows at the next
    phase, in the call to offload, before any part is onloaded."""
    process = quickstart.start(tmp_path, *SETTINGS, PYTHONPATH=str(quickstart.ROOT))
    wait_for_row(tmp_path / "run", 1, process)
    (tmp_path / paused.PAUSE).touch()
    deadline = time.monotonic() + 300
    while not (tmp_path / paused.PAUSED).exists():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.02)
    os.kill(quickstart.actors(tmp_path, "MegatronActor")[-1], signal.SIGKILL)
    (tmp_path / paused.PAUSE).unlink()
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 0, out
    faults = [line for line in out.splitlines() if "fault:" in line]
    assert len(faults) == 1 and "policy-" in faults[0] and "in offload: its process died" in faults[0], out
    assert "restarting the run from its newest checkpoint" in out
    rows = read(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["residency/bytes_out"] and row["residency/bytes_in"] for row in rows), "parts have moved"
    assert quickstart.left_over(tmp_path) == []
