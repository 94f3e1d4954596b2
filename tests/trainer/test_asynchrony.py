"""Whole runs that generate ahead: staleness 0 equals a synchronous run; a killed and resumed run loses nothing."""

from __future__ import annotations

import signal
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from skyrl_mega.cli import export
from skyrl_mega.telemetry.metrics import read
from skyrl_mega.trajectories import parquet
from skyrl_mega.trajectories.trajectory import Trajectory
from tests.trainer import quickstart
from tests.trainer.test_resume import wait_for_row

STEPS = [*quickstart.LEARNS, "run.steps=4"]
ONE_RANK = ("policy.ranks=1", "policy.layout.expert=1")
UNEVALUATED = ("evaluation.before=false", "evaluation.every=0")
CLOCK = ("time", "perf", "memory", "idle", "asynchrony")


def rows(folder: Path) -> list[dict[str, Any]]:
    """Returns a run's metrics without speed and memory."""
    all_rows = read(folder / "metrics.jsonl")
    return [{k: v for k, v in row.items() if k.split("/")[0] not in CLOCK} for row in all_rows]


def killed_and_resumed(folder: Path, step: int, *settings: str) -> str:
    """Runs, kills the run after this step, resumes to the end and returns the output of the second command."""
    settings = ("run.name=killed", *STEPS, *settings)
    process = quickstart.start(folder, *settings)
    wait_for_row(folder / "killed", step, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 60
    while quickstart.left_over(folder) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert quickstart.left_over(folder) == []
    return quickstart.finish(folder, *settings)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_staleness_0_is_what_a_synchronous_run_does(undisturbed: Path, tmp_path: Path) -> None:
    """Compares a synchronous run with an asynchronous run of staleness 0, and with a run whose trajectories are played
    in other processes and reach the ranks by reference."""
    expected = rows(undisturbed)
    # `one_step` with staleness 0 calls the same code as `off`
    ahead = ["asynchrony.mode=full", "asynchrony.max_staleness=0"]
    quickstart.finish(tmp_path, "run.name=ahead", *quickstart.THREE_STEPS, *ahead)
    assert rows(tmp_path / "ahead") == expected
    assert expected[-1]["policy/grad_norm"] > 0
    quickstart.finish(tmp_path, "run.name=apart", *quickstart.THREE_STEPS, "environment.processes=2")
    for local, remote in zip(expected, rows(tmp_path / "apart"), strict=True):
        assert remote.pop("environment/slot_wait_s", 0.0) >= 0
        assert remote == pytest.approx(local, rel=1e-3, abs=1e-4, nan_ok=True)
    whole, apart = (
        [(t.tokens, t.messages) for t in parquet.read(run / "trajectories" / "step_000001.parquet")]
        for run in (undisturbed, tmp_path / "apart")
    )
    assert apart == whole


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_one_step_ahead_killed_and_resumed_equals_never_killed(tmp_path: Path) -> None:
    """Resumes with the batch generated ahead, saved in the checkpoint because the weights behind the batch are gone."""
    ahead = ["asynchrony.mode=one_step", "telemetry.trajectories_every=1"]
    quickstart.finish(tmp_path, "run.name=whole", *STEPS, *ahead)
    assert "resuming after step 2" in killed_and_resumed(tmp_path, 3, *ahead), "between two checkpoints"
    assert rows(tmp_path / "killed") == rows(tmp_path / "whole")
    stale = [row["asynchrony/staleness_max"] for row in read(tmp_path / "whole" / "metrics.jsonl") if row["step"]]
    assert stale == [0, 1, 1, 1]
    for step in range(1, 5):
        file = Path("trajectories") / f"step_{step:06d}.parquet"
        played = [[t.tokens for t in parquet.read(tmp_path / run / file)] for run in ("killed", "whole")]
        assert played[0] == played[1]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_the_time_ahead_killed_and_resumed_loses_nothing(tmp_path: Path) -> None:
    """Checks a killed and resumed run: every group trained on once, no token too old, and each log-prob equal to
    transformers' with the token's version (within 1e-4).

    Routers replay the engines' routes under any weights; each pass checks the route of every token.
    """
    ahead = ["asynchrony.mode=full", "asynchrony.max_staleness=2", "telemetry.trajectories_every=1"]
    ahead += ["policy.moe.replay=rollout", *ONE_RANK, *UNEVALUATED]
    output = killed_and_resumed(tmp_path, 2, *ahead, "checkpoint.every=1", "checkpoint.keep=9")
    assert "resuming after step" in output and "restored " in output
    folder = tmp_path / "killed"
    steps = {n: parquet.read(folder / "trajectories" / f"step_{n:06d}.parquet") for n in range(1, 5)}
    groups = Counter(t.prompt.uid for step in steps.values() for t in step)
    assert len(groups) == 64 and set(groups.values()) == {4}, "64 groups of 4 samples, each once"
    worst = max(step - 1 - version for step, of in steps.items() for t in of for version, _ in t.versions)
    assert 0 < worst <= 2
    routed = [row for row in read(folder / "metrics.jsonl") if row["step"]]
    assert all(row["replay/replayed_fraction"] > 0.5 and row["replay/mismatched"] == 0 for row in routed)
    versions = sorted({version for step in steps.values() for t in step for version, _ in t.versions})
    for version in (versions[0], versions[-1]):  # before the kill and after
        model = tmp_path / f"version-{version}"
        assert export.main([str(folder), "--step", str(version), "--output", str(model), "--workers", "1"]) == 0
        trajectories = [t for step in steps.values() for t in step if version in dict(t.versions)][:40]
        assert differences(model, trajectories, version) < 1e-4


def differences(path: Path, trajectories: list[Trajectory], version: int) -> float:
    """Returns the largest difference between the engines' log-probs of `version` and the model's."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    worst = 0.0
    for t in trajectories:
        with torch.no_grad():
            logprobs = model(torch.tensor([list(t.tokens)])).logits[0].log_softmax(-1)
        starts = [*t.versions, (-1, len(t.tokens))]
        for (of, start), (_, end) in pairwise(starts):
            for at in range(start, end) if of == version else ():
                if t.mask[at]:
                    worst = max(worst, abs(float(logprobs[at - 1, t.tokens[at]]) - t.logprobs[at]))
    return worst
