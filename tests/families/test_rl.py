"""Every family takes RL steps in a whole run, with equal log-probs in engine and policy."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from skyrl_mega.models.char_tokenizer import write_tokenizer
from skyrl_mega.telemetry.metrics import read
from tests.families.models import IN_FLOAT32_ENGINES
from tests.trainer import quickstart

MISMATCH = 1e-3
STEPS = 3


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("name", IN_FLOAT32_ENGINES)
def test_three_steps_of_rl(name: str, families: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(families / f"{name}-0", tmp_path / "policy"))
    write_tokenizer(model)
    without_build = ["model.build=null", f"model.path={model}", "warmup.steps=0", "warmup.files=[]"]
    settings = [*without_build, *quickstart.LEARNS, f"run.steps={STEPS}", "policy.layout.tensor=2"]
    quickstart.finish(tmp_path, "run.name=run", *settings)
    rows = read(tmp_path / "run" / "metrics.jsonl")
    steps = [row for row in rows if "mismatch/logprob_abs_max" in row]
    assert len(steps) == STEPS
    assert all(0 < row["mismatch/logprob_abs_max"] < MISMATCH for row in steps)
    assert all(row["policy/grad_norm"] > 0 for row in steps)
