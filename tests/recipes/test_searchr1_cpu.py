"""`configs/searchr1_cpu.yaml` with the real model, at test size: the run builds and serves its search engine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from skyrl_mega.common.errors import UserError
from skyrl_mega.retriever.embedder import model_folder
from skyrl_mega.telemetry.metrics import read
from skyrl_mega.trajectories import parquet
from tests.trainer.quickstart import left_over

ROOT = Path(__file__).parents[2]
PROMPTS, SAMPLES = 2, 3


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_a_step_with_searches(smollm2: Path, tmp_path: Path) -> None:
    try:
        model_folder("minilm")
    except UserError as absent:
        pytest.skip(str(absent))
    command = [
        *(sys.executable, "-m", "skyrl_mega.launch", "--config", str(ROOT / "configs" / "searchr1_cpu.yaml")),
        f"run.directory={tmp_path}",
        "run.steps=1",
        f"model.path={smollm2}",
        f"data.folder={tmp_path / 'data'}",
        f"data.prompts_per_step={PROMPTS}",
        f"data.samples_per_prompt={SAMPLES}",
        "rollout.max_turns=2",
        "evaluation.before=false",
        "evaluation.every=0",
        # A search earns a reward from the first step on; a right answer at this size is rare.
        f"environment.classes.search={Path(__file__).with_name('partial.py')}:Searching",
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "SKYRL_MEGA_TEST": str(tmp_path)}
    result = subprocess.run(
        command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1150
    )
    assert result.returncode == 0, result.stdout
    assert left_over(tmp_path) == []

    (row,) = read(tmp_path / "searchr1_cpu" / "metrics.jsonl")
    assert row["mismatch/logprob_abs_mean"] < 1e-3
    assert row["reward/std"] > 0 and row["policy/grad_norm"] > 0
    trajectories = parquet.read(tmp_path / "searchr1_cpu" / "trajectories" / "step_000001.parquet")
    assert len(trajectories) == PROMPTS * SAMPLES
    searches = [search for t in trajectories for search in t.metadata["searches"]]
    assert searches and not any("error" in search for search in searches)
    passages = {str(row["id"]) for row in pq.read_table(tmp_path / "data" / "corpus.parquet").to_pylist()}
    assert all(len(search["found"]) == 1 and set(search["found"]) <= passages for search in searches)
    # A passage is among the tokens, and outside the loss.
    t = next(t for t in trajectories if t.metadata["searches"])
    assert t.turns == 2 and t.messages[-2]["content"].startswith("\n<information>Doc 1(Title: ")
    assert 0 < sum(t.mask) < t.response_length
