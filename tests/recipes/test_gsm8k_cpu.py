"""`configs/gsm8k_cpu.yaml` with the real model and real questions, at test size, through the launcher."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from skyrl_mega.telemetry.metrics import read
from skyrl_mega.trajectories import parquet
from tests.trainer.quickstart import left_over

ROOT = Path(__file__).parents[2]
STEPS, PROMPTS, SAMPLES, LENGTH = 2, 2, 3, 24


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_two_steps_on_real_questions(real_data: Path, smollm2: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    command = [
        *(sys.executable, "-m", "skyrl_mega.launch", "--config", str(ROOT / "configs" / "gsm8k_cpu.yaml")),
        f"run.directory={tmp_path}",
        f"run.steps={STEPS}",
        f"model.path={smollm2}",
        f"environment.classes.gsm8k={Path(__file__).with_name('partial.py')}:Partial",
        f"data.prepare=gsm8k --output {data} --source {real_data}/data/gsm8k --limit 40 --shots 1",
        f"data.train=[{data}/train.parquet]",
        f"data.eval=[{data}/test.parquet]",
        f"data.prompts_per_step={PROMPTS}",
        f"data.samples_per_prompt={SAMPLES}",
        f"rollout.sampling.max_tokens={LENGTH}",
        "evaluation.before=false",
        "evaluation.every=2",
        "evaluation.limit=2",
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "SKYRL_MEGA_TEST": str(tmp_path)}
    result = subprocess.run(
        command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=850
    )
    assert result.returncode == 0, result.stdout
    assert left_over(tmp_path) == []

    first, second = read(tmp_path / "gsm8k_cpu" / "metrics.jsonl")
    assert (first["step"], second["step"]) == (1, STEPS)
    for row in (first, second):
        # The second step compares synced engine weights with the policy's trained weights.
        assert row["mismatch/logprob_abs_mean"] < 1e-3
        assert row["policy/grad_norm"] > 0 and row["reward/std"] > 0
    assert first["policy/kl"] == pytest.approx(0, abs=1e-9)  # the reference equals the initial policy
    assert second["policy/kl"] > first["policy/kl"]
    assert second["eval/openai_gsm8k/mean"] >= 0

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    questions = [json.loads(line)["question"] for line in (real_data / "data" / "gsm8k" / "train.jsonl").open()]
    for step in (1, STEPS):
        trajectories = parquet.read(tmp_path / "gsm8k_cpu" / "trajectories" / f"step_{step:06d}.parquet")
        assert len(trajectories) == PROMPTS * SAMPLES
        for t in trajectories:
            assert 0 < t.response_length <= LENGTH and len(t.tokens) == len(t.mask) == len(t.logprobs)
            words = tokenizer.decode(list(t.tokens[t.prompt_length :])).removesuffix("<|im_end|>")
            assert t.messages[-1] == {"role": "assistant", "content": words}
            question = t.prompt.extras["extra_info"]["question"]
            assert question in questions
            assert question in tokenizer.decode(list(t.tokens[: t.prompt_length]))
