"""Runs unable to learn, through the real loop: the messages, the files, and the exit."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyrl_mega.report import run_data
from skyrl_mega.telemetry.metrics import read
from skyrl_mega.trajectories import parquet
from tests.trainer import quickstart

ENVIRONMENT = """
import re
from skyrl_mega.envs import BaseTextEnv, BaseTextEnvStepOutput


class Broken(BaseTextEnv):
    def step(self, action):
        if len(action) % 5 == 4:
            raise KeyError(action)
        found = re.search("the answer is (.*)", action)
        parsed = found and found[1]
        reward = float(parsed == self.ground_truth)
        return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={"parsed": parsed})
"""
SETTINGS = (
    *("policy.ranks=1", "policy.layout.expert=1", "model.build.layers=1", "warmup.steps=0", "evaluation.before=false"),
    *("evaluation.every=0", "checkpoint.every=1", "run.steps=6", "telemetry.trackers=[]", "run.name=r"),
    "rollout.sampling.max_tokens=40",  # a random policy ends a third of its answers within this limit
)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_parser_that_reads_nothing_ends_the_run_with_the_evidence(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(ENVIRONMENT)
    process = quickstart.start(
        tmp_path,
        *SETTINGS,
        "environment.classes.addition=broken.py:Broken",
        "run.patience=2",
        "run.patience_groups=0",
        "algorithm=grpo",
    )
    out, _ = process.communicate(timeout=850)
    assert process.returncode == 1, out
    run = tmp_path / "r"
    rows = read(run / "metrics.jsonl")
    assert [row["health/stuck_steps"] for row in rows] == [1, 2]
    assert all(row["health/nothing_parsed"] == 1 and row["policy/grad_norm"] < 1e-6 for row in rows)

    warnings = [line for line in out.splitlines() if line.startswith("health: step 1: ")]
    kinds = {line.split(": ")[2]: line for line in warnings}
    assert "'parsed': null for all" in kinds["nothing_parsed"] and "after 1 more such step" in kinds["nothing_parsed"]
    assert set(kinds) <= {"nothing_parsed", "environment_fails"}, "nothing else is blamed"
    failed = [t for t in parquet.read(run / "trajectories" / "step_000001.parquet") if t.status.failed]
    if failed:
        assert f"{len(failed)} of 64 trajectories failed" in kinds["environment_fails"]
        assert "broken.py, line 9, in step: raise KeyError(action)" in kinds["environment_fails"]
    assert "raised KeyError" not in out.replace(kinds.get("environment_fails", "\0"), ""), "once, and then counted"

    fault, where = (line for line in out.splitlines() if line.startswith(("fault: ", "  logs  ")))
    assert "the last 2 steps up to 2" in fault and "run.patience = 2" in fault and "nothing_parsed: " in fault
    assert where.endswith("r/checkpoints/step_000002 is saved: the same command resumes after step 2")
    assert [n.kind for n in run_data.read(run).findings if n.kind == "nothing_parsed"] == ["nothing_parsed"]
    assert "What the run noticed about itself" in (run / "report.html").read_text()
    assert quickstart.left_over(tmp_path) == []
