"""KL to the reference, on the policy's own ranks and on ranks of its own; with an environment of the user's."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyrl_mega.telemetry.metrics import read
from tests.trainer import quickstart

ENVIRONMENT = """
from skyrl_mega.envs import BaseTextEnv, BaseTextEnvStepOutput


class LongerIsBetter(BaseTextEnv):
    def step(self, action: str) -> BaseTextEnvStepOutput:
        return BaseTextEnvStepOutput(observations=[], reward=len(action) / 8, done=True, metadata={})
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_reference_in_its_own_layout_gives_the_same_kl(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(ENVIRONMENT)
    settings = (
        "run.steps=3",
        "warmup.steps=0",
        "algorithm.kl.coefficient=0.1",
        "algorithm.dynamic_sampling.enabled=false",
        f"environment.classes.addition={tmp_path}/mine.py:LongerIsBetter",
        "policy.optimizer.lr=3e-3",
        "policy.optimizer.warmup_steps=0",
        "evaluation.every=0",
        "checkpoint.every=0",
    )
    quickstart.finish(tmp_path, "run.name=shared", *settings)
    quickstart.finish(
        tmp_path,
        "run.name=own",
        "reference.layout.tensor=2",
        "reference.layout.expert=2",
        "reference.ranks=2",
        *settings,
    )
    shared, own = (read(tmp_path / name / "metrics.jsonl")[1:] for name in ("shared", "own"))
    kl = [float(row["policy/kl"] or 0) for row in shared]
    assert len(kl) == 3 and kl[0] == pytest.approx(0, abs=1e-9) and kl[2] > 1e-5
    assert [row["policy/kl"] for row in own] == pytest.approx(kl, rel=1e-3, abs=1e-9)
    assert [row["policy/loss"] for row in own] == pytest.approx([row["policy/loss"] for row in shared], abs=1e-6)
    assert max(float(row["mismatch/logprob_abs_mean"] or 0) for row in shared) < 1e-3
    assert quickstart.left_over(tmp_path) == []
