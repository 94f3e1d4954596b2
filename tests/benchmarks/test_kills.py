"""The benchmark of kills without its runs: it finds what is lost, doubled, too old or other than undisturbed."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.kills import PROMPTS, SAMPLES, STEPS, Disturbed, wrong
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.rollout import trajectory_io
from skyrl_mega.rollout.trajectory import Status, Trajectory

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


def ended(folder: Path, steps: Steps) -> Any:
    (folder / "run" / "model").mkdir(parents=True)
    for step, trajectories in steps.items():
        trajectory_io.write(folder / "run" / "trajectories" / f"step_{step:06d}.parquet", trajectories)
    rows = [{"step": step} for step in (0, *steps)]
    (folder / "run" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    save_file({"w": torch.ones(2)}, folder / "run" / "model" / "model.safetensors")
    nothing: Any = None
    return Disturbed(folder, "full", nothing)


def doubled(steps: Steps) -> None:
    steps[5][0] = steps[4][0]


def lost(steps: Steps) -> None:
    steps[3].pop()


def old(steps: Steps) -> None:
    steps[7][5].versions = [(3, 1)]


def no_step(steps: Steps) -> None:
    del steps[STEPS]


def test_a_run_as_it_must_be(tmp_path: Path) -> None:
    run = ended(tmp_path, whole())
    assert wrong(run, 0, {"w": torch.ones(2)}) == []
    assert wrong(run, 1, None) == ["exit code 1"]
    assert wrong(run, 0, {"w": torch.zeros(2)}) == ["other weights than undisturbed"]


@pytest.mark.parametrize(
    ("plant", "words"),
    [(doubled, "each [1, 2] times"), (lost, "step 3: 63 trajectories"), (old, "of 3 syncs ago"), (no_step, "steps [1")],
)
def test_a_planted_mistake_is_found(tmp_path: Path, plant: Callable[[Steps], None], words: str) -> None:
    steps = whole()
    plant(steps)
    assert any(words in mistake for mistake in wrong(ended(tmp_path, steps), 0, None))
