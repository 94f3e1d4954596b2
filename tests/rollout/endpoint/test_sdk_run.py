"""Three RL steps with the unmodified SDKs of OpenAI and Anthropic, through the launcher."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from skyrl_mega.telemetry.metrics import read
from skyrl_mega.trajectories import parquet
from skyrl_mega.trajectories.trajectory import Kind, Status
from tests.rollout.endpoint.sdk_agents import WAYS
from tests.trainer.quickstart import left_over

ROOT = Path(__file__).parents[3]
STEPS, PROMPTS, SAMPLES = 3, 4, 4


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_three_steps_with_every_api(tmp_path: Path) -> None:
    data = tmp_path / "data"
    command = [
        *(sys.executable, "-m", "skyrl_mega.launch", "--config", str(ROOT / "configs" / "agent_cpu.yaml")),
        f"run.directory={tmp_path}",
        "run.name=every_api",
        f"run.steps={STEPS}",
        f"model.path={tmp_path}/model",
        f"environment.classes.agent={Path(__file__).with_name('sdk_agents.py')}:EveryApi",
        f"data.prepare=calculator --output {data} --train 64 --test 8 --demonstrations 256 --env agent",
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
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "SKYRL_MEGA_TEST": str(tmp_path), "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=850
    )
    assert result.returncode == 0, result.stdout
    assert left_over(tmp_path) == []
    run = tmp_path / "every_api"
    rows = read(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for row in rows:
        assert row["mismatch/logprob_abs_mean"] < 1e-3 and row["policy/grad_norm"] > 0
        assert row["environment/of/agent_requests"] == 2
        assert row["environment/of/agent_branches"] == 1, "a reply was not recognised when it came back"
        assert row["environment/of/agent_dropped_tokens"] == 0
        assert row["environment/of/agent_ignored_parameters"] == 0
    trajectories = [
        t for step in range(1, STEPS + 1) for t in parquet.read(run / "trajectories" / f"step_{step:06d}.parquet")
    ]
    assert len(trajectories) == STEPS * PROMPTS * SAMPLES
    assert {t.status for t in trajectories} <= {Status.COMPLETED, Status.TRUNCATED_TOKENS}
    ways = Counter(t.metadata["way"] for t in trajectories)
    assert ways == {f"{name} {stream}": len(trajectories) // len(WAYS) for name, stream in WAYS}
    for t in trajectories:
        assert [step.kind for step in t.steps] == [Kind.PROMPT, Kind.RESPONSE, Kind.OBSERVATION, Kind.RESPONSE]
