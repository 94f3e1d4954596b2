"""The checks of the benchmark of kills, without runs: lost, doubled, too old and changed trajectories."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.kills import NODE, PROMPTS, SAMPLES, STEPS, Disturbed, Expected, compared, left, wrong
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.trajectories import parquet
from skyrl_mega.trajectories.trajectory import Status, Trajectory

Steps = dict[int, list[Trajectory]]


def played(step: int, prompt: int, sample: int, version: int) -> Trajectory:
    arrays = array("i", [1, 2]), array("b", [0, 1]), array("f", [0.0, -0.5])
    uid = (step - 1) * PROMPTS + prompt
    return Trajectory(
        Prompt(uid, [], "addition", {}), sample, *arrays, 1, 1.0, Status.COMPLETED, 1, versions=[(version, 1)]
    )


def whole() -> Steps:
    return {
        step: [played(step, p, s, max(0, step - 3)) for p in range(PROMPTS) for s in range(SAMPLES)]
        for step in range(1, STEPS + 1)
    }


def ended(folder: Path, steps: Steps) -> Disturbed:
    (folder / "run" / "model").mkdir(parents=True)
    for step, trajectories in steps.items():
        parquet.write(folder / "run" / "trajectories" / f"step_{step:06d}.parquet", trajectories)
    rows = [{"step": step, "policy/grad_norm": 0.5} for step in (0, *steps)]
    (folder / "run" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    save_file({"w": torch.ones(2)}, folder / "run" / "model" / "model.safetensors")
    return Disturbed(folder, "full", cast(Any, None))


def undisturbed(value: float = 1.0) -> Expected:
    samples = Counter((t.prompt.uid, t.sample) for step in whole().values() for t in step)
    versions = [{max(0, step - 3)} for step in range(1, STEPS + 1)]
    return Expected(samples, {"w": torch.full((2,), value)}, versions, 10.0)


def doubled(steps: Steps) -> None:
    steps[5][0] = steps[4][0]


def lost(steps: Steps) -> None:
    steps[3].pop()


def replaced(steps: Steps) -> None:
    steps[3] = [*steps[3][SAMPLES:], *(played(STEPS + 1, 0, sample, 0) for sample in range(SAMPLES))]


def old(steps: Steps) -> None:
    steps[7][5].versions = [(3, 1)]


def no_step(steps: Steps) -> None:
    del steps[STEPS]


def test_a_run_as_it_must_be(tmp_path: Path) -> None:
    run = ended(tmp_path, whole())
    assert wrong(run, undisturbed()) == []
    assert wrong(run, undisturbed(0.0)) == ["other weights than undisturbed"]
    exported = tmp_path / "run" / "model" / "model.safetensors"
    for spoil in (lambda: exported.write_bytes(b"torn"), exported.unlink):
        spoil()
        for expected in (undisturbed(), replace(undisturbed(), weights=None)):
            assert wrong(run, expected) == ["no weights were exported"]
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "policy/grad_norm": 1.0}\n')
    assert wrong(run, None) == ["steps [1, 2]", "steps [1] have changed nothing"]


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (doubled, "1 samples were trained on more than once"),
        (lost, "step 3: 63 trajectories"),
        (replaced, "4 samples of the undisturbed run were not trained on"),
        (old, "of 3 syncs ago"),
        (no_step, "steps [1"),
    ],
)
def test_a_planted_mistake_is_found(tmp_path: Path, plant: Callable[[Steps], None], words: str) -> None:
    steps = whole()
    plant(steps)
    assert any(words in mistake for mistake in wrong(ended(tmp_path, steps), undisturbed()))


def test_processes_that_are_left_are_named(tmp_path: Path) -> None:
    run, node = Disturbed(tmp_path, "full", cast(Any, None)), f"{tmp_path}/node-0"
    run.nodes.append(node)
    title = "import time; 'RolloutWorker'; time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", title], env=os.environ | {NODE: node})
    try:
        assert any("RolloutWorker" in words for words in left(run, within_s=0.5))
    finally:
        process.kill()
        process.wait()
    assert left(run, within_s=0.5) == []


@pytest.mark.parametrize(
    ("role", "version", "right"),
    [("VllmEngine", 4, True), ("VllmEngine", 2, False), ("driver", 4, False), ("node", 4, False)],
)
def test_other_weights_are_right_only_after_a_batch_of_an_engine_that_came_back(
    tmp_path: Path, role: str, version: int, right: bool
) -> None:
    """Checks a replayed step: step 5 has version 2 without a fault; a restarted engine generates with the current
    weights."""
    steps = whole() | {5: [played(5, p, s, version) for p in range(PROMPTS) for s in range(SAMPLES)]}
    run = ended(tmp_path, steps)
    run.kills.append({"role": role, "after_step": 4})
    assert wrong(run, undisturbed(2.0)) == ([] if right else ["other weights than undisturbed"])
    assert compared(run, undisturbed(2.0)) == ("redrawn" if right else "other")
    assert compared(run, undisturbed()) == "same" and compared(run, replace(undisturbed(), weights=None)) is None


def test_faults_that_a_run_tells_of_are_kept(tmp_path: Path) -> None:
    run = Disturbed(tmp_path, "full", cast(Any, None))
    assert run.faults == [] and run.last_word == "nothing said"
    run.last_said = run.said = (
        f"start ray\nfault: policy-0 died; its log: {tmp_path}/run/logs\nthe run starts again\n  logs  here\n"
    )
    assert run.faults == ["fault: policy-0 died; its log: run/logs"] and run.last_word.startswith("fault: policy-0")
