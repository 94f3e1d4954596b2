"""Three RL steps with the unmodified SDKs of OpenAI and Anthropic, through the launcher."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from skyrl_mega.telemetry.metrics import read
from skyrl_mega.trajectories import parquet
from skyrl_mega.trajectories.trajectory import Kind, Status
from tests.rollout.endpoint.agent_runs import PROMPTS, SAMPLES, finish, start
from tests.rollout.endpoint.sdk_agents import WAYS
from tests.trainer.quickstart import left_over

STEPS = 3


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_three_steps_with_every_api(tmp_path: Path) -> None:
    agent = f"environment.classes.agent={Path(__file__).with_name('sdk_agents.py')}:EveryApi"
    finish(start(tmp_path, "every_api", STEPS, agent))
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
