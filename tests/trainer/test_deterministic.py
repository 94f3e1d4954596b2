"""Two runs with `run.deterministic` agree to the last bit: figures, trajectories and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.trainer import chance, quickstart
from tests.trainer.test_resume import figures

ENVIRONMENT = f"environment.classes={{addition: {quickstart.ROOT}/tests/trainer/chance.py:Chance}}"
SETTINGS = (
    "run.deterministic=true",
    "run.steps=3",
    "checkpoint.every=3",
    "evaluation.every=3",
    "evaluation.before=false",
    "telemetry.trackers=[]",
    "warmup.steps=0",
    "algorithm.dynamic_sampling.enabled=false",
    "model.build.max_length=128",
    "rollout.engines=2",
    "rollout.max_turns=3",
    "rollout.max_response_tokens=60",
    f"rollout.sampling.stop=[{','.join(chance.STOP)}]",
    ENVIRONMENT,
)
"""Settings with two engines, up to three turns, and an environment of random duration."""
CLOCK = {"steps", "seconds"}
"""Trajectory columns that contain times."""


def trajectories(folder: Path) -> list[dict[str, Any]]:
    files = sorted((folder / "trajectories").glob("*.parquet"))
    assert len(files) == 3
    return [{k: v for k, v in row.items() if k not in CLOCK} for f in files for row in pq.read_table(f).to_pylist()]


def checkpoint(folder: Path) -> dict[str, bytes]:
    root = folder / "checkpoints"
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_two_runs_are_one(tmp_path: Path) -> None:
    for name in ("a", "b"):
        quickstart.finish(tmp_path, f"run.name={name}", *SETTINGS)
    a, b = tmp_path / "a", tmp_path / "b"
    rows = figures(a)
    assert [row["policy/grad_norm"] > 0 for row in rows] == [True] * 3 and rows == figures(b)
    assert trajectories(a) == trajectories(b)
    assert len(checkpoint(a)) > 3 and checkpoint(a) == checkpoint(b)
