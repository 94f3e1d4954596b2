"""KL to the reference, on the policy's ranks and on separate ranks, with a user's environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyrl_mega.telemetry.metrics import read
from tests.telemetry import trace_format
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
    recorded = ("telemetry.profile.steps=[2]", "telemetry.profile.ranks=[0,1]")
    quickstart.finish(tmp_path, "run.name=shared", *recorded, *settings)
    quickstart.finish(
        tmp_path,
        "run.name=own",
        "reference.layout.tensor=2",
        "reference.layout.expert=2",
        "reference.ranks=2",
        *settings,
    )
    shared, separate = (read(tmp_path / name / "metrics.jsonl")[1:] for name in ("shared", "own"))
    kl = [float(row["policy/kl"] or 0) for row in shared]
    assert len(kl) == 3 and kl[0] == pytest.approx(0, abs=1e-9) and kl[2] > 1e-5
    assert [row["policy/kl"] for row in separate] == pytest.approx(kl, rel=1e-3, abs=1e-9)
    assert [row["policy/loss"] for row in separate] == pytest.approx([row["policy/loss"] for row in shared], abs=1e-6)
    assert max(float(row["mismatch/logprob_abs_mean"] or 0) for row in shared) < 1e-3
    assert quickstart.left_over(tmp_path) == []
    measured(shared[1], separate[1])
    traced(tmp_path / "shared" / "profile")


def measured(shared: dict[str, float | None], separate: dict[str, float | None]) -> None:
    """Checks that the figures of a step exist, except those unknown on a CPU."""
    for row in (shared, separate):
        assert all(
            (row[f"memory/policy_{phase}_gib"] or 0) > 0.1 for phase in ("generate", "logprobs", "train", "sync")
        )
        assert (row["memory/engine_generate_gib"] or 0) > 0.25, "its cache alone has that"
        assert (row["perf/train_tflops_per_rank"] or 0) > 0 and (row["perf/engine_steps"] or 0) >= 8
        assert not any("mfu" in name or "share" in name for name in row if name.startswith("perf/"))
    assert "memory/reference_logprobs_gib" in separate and "memory/reference_logprobs_gib" not in shared


def traced(folder: Path) -> None:
    """Checks the single trace: spans of every process lie inside the step."""
    assert [file.name for file in folder.iterdir()] == ["step_2.json.gz"]
    spans_by_process = trace_format.tracks(folder / "step_2.json.gz")
    assert sorted(spans_by_process) == ["driver", "engine-0", "environments", "policy-0", "policy-1"]
    step = spans_by_process["driver"][0]
    assert [span["name"] for span in spans_by_process["driver"]] == ["step 2", "generate", "logprobs", "train", "sync"]
    assert all(trace_format.properly_nested(spans) for spans in spans_by_process.values())
    assert all(trace_format.within(spans, step, slack_us=50_000) for spans in spans_by_process.values())
    phases = {span["name"]: span for span in spans_by_process["driver"]}
    assert trace_format.within(spans_by_process["engine-0"], phases["generate"], slack_us=1000)
    for rank in ("policy-0", "policy-1"):
        [train] = [span for span in spans_by_process[rank] if span["name"] == "train"]
        assert trace_format.within([train], phases["train"], slack_us=1000)
        assert {"keep_logprobs", "send_weights", "aten::mm"} <= {span["name"] for span in spans_by_process[rank]}
