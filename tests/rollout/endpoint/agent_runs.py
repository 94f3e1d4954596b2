"""Test-sized runs of `configs/agent_cpu.yaml`, through the launcher."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
PROMPTS, SAMPLES = 4, 4
"""Prompts of a step, and samples of a prompt."""


def start(folder: Path, name: str, steps: int, *settings: str, env: str = "agent") -> subprocess.Popen[str]:
    """Starts a run whose processes are marked in their environment, for `quickstart.left_over` to find.

    Args:
        folder: Folder of the run, its data and its model.
        name: Name of the run.
        steps: Number of RL steps.
        settings: Further settings.
        env: Environment of the rows.
    """
    data = folder / "data"
    command = [
        *(sys.executable, "-m", "skyrl_mega.launch", "--config", str(ROOT / "configs" / "agent_cpu.yaml")),
        f"run.directory={folder}",
        f"run.name={name}",
        f"run.steps={steps}",
        f"model.path={folder}/model",
        f"environment.classes.agent={ROOT}/configs/agent_cpu.py:CalculatorAgent",
        f"data.prepare=calculator --output {data} --train 64 --test 8 --demonstrations 256 --env {env}",
        f"data.train=[{data}/train.parquet]",
        f"data.eval=[{data}/test.parquet]",
        f"warmup.files=[{data}/demonstrations.parquet]",
        "warmup.steps=40",
        f"data.prompts_per_step={PROMPTS}",
        f"data.samples_per_prompt={SAMPLES}",
        "rollout.sampling.max_tokens=32",
        "evaluation.before=false",
        "evaluation.every=0",
        "telemetry.trajectories_every=1",
        *settings,
    ]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "SKYRL_MEGA_TEST": str(folder), "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command, cwd=folder, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(process: subprocess.Popen[str], timeout: float = 850) -> str:
    """Waits for the end of a run and returns the output; fails unless the exit code is 0."""
    output, _ = process.communicate(timeout=timeout)
    assert process.returncode == 0, output
    return output
