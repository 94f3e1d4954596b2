"""The unmodified mini-swe-agent on software tasks in containers of a real podman."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skyrl_mega.envs.harness.env import HarnessEnv
from skyrl_mega.rollout.endpoint.server import EndpointServer
from skyrl_mega.telemetry.metrics import read
from skyrl_mega.trajectories import parquet
from skyrl_mega.trajectories.trajectory import Status
from tests.envs.swe.test_podman_tasks import archive_of, containers, override
from tests.envs.swe.toys import PATIENT, Toy, write_toys
from tests.rollout.endpoint.agent_runs import finish, start
from tests.rollout.endpoint.fakes import running_loop
from tests.rollout.endpoint.test_mini_swe_agent import MINI, TalkingSession, calling, installed
from tests.support.containers import IMAGE, podman_options, remove_store
from tests.trainer.quickstart import left_over

pytestmark = [installed, pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(1800)]
ROOT = Path(__file__).parents[3]


CONFIG = """
agent:
  system_template: Fix the code.
  instance_template: "{{task}}"
"""
"""A short configuration of the agent, for a model with a short context."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, Toy], dict[str, Any]]]:
    """Returns tasks, and options of podman's containers with mini-swe-agent and its interpreter."""
    if os.geteuid() != 0:
        pytest.skip("only root brings the address of the policy into a container")
    folder, store = tmp_path_factory.mktemp("toys"), tmp_path_factory.mktemp("podman")
    toys = write_toys(folder, ["spread", "last"])
    options = podman_options(store, archive_of(folder / "images" / IMAGE / "repos"))
    libraries = Path("/usr/lib") / f"{os.uname().machine}-linux-gnu"
    folders = [MINI.parents[1].resolve(), MINI.resolve().parents[1], libraries]
    options["arguments"] = [*options["arguments"], *(f"--volume={path}:{path}:ro" for path in folders)]
    yield toys, options
    remove_store(store)


def settings(toys: dict[str, Toy], options: dict[str, Any]) -> dict[str, Any]:
    judge = {"tasks": str(toys["spread"].tasks), "session": "podman", "session_options": options, **PATIENT}
    command = f"{MINI.parents[1].resolve()}/bin/python {ROOT}/configs/mini_swe_agent.py"
    return {"command": command, "reward": "swe", "reward_options": judge, "timeout_s": 200, "failed_exit": "judge"}


def test_it_repairs_a_task(place: Any) -> None:
    toys, options = place
    submit = calling("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
    for work, reward in ((toys["spread"].repair, 1.0), ("git log --oneline", 0.0)):
        session, server = TalkingSession([calling("ls tests; pwd"), calling(work), submit]), EndpointServer()
        env = HarnessEnv(settings(toys, options), toys["spread"].row | {"max_turns": 5})
        with running_loop() as loop:
            env.prepare()
            output = env.run(server.open(session, loop), [{"role": "user", "content": "Repair tools.py."}])
            server.stop()
        assert output["reward"] == reward, output["metadata"]
        assert output["metadata"]["program"]["exit"] == 0 and len(session.requests) == 3
        seen = json.loads(session.requests[1].messages[3]["content"])["output"]  # type: ignore[union-attr]
        assert "test_old.py" in seen and "test_new.py" not in seen and "/repos/spread" in seen
        assert containers(options) == []


def test_a_step_of_a_run(place: Any, tmp_path: Path) -> None:
    """Runs a step of RL with an untrained model: the agents end at the limit of requests, and the tests fail."""
    toys, options = place
    short = tmp_path / "short.yaml"
    short.write_text(CONFIG)
    given = settings(toys, {**options, "arguments": [*options["arguments"], f"--volume={short}:{short}:ro"]})
    command = f"{given['command']} -c mini.yaml -c {short}"
    data = tmp_path / "swe"
    process = start(
        tmp_path,
        "podman",
        1,
        f"environment.options.harness={override(given | {'command': command})}",
        f"data.prepare=swe --output {data} --source {toys['spread'].tasks} --env harness",
        f"data.train=[{data}/train.parquet]",
        "data.eval=[]",
        "warmup.steps=0",
        "warmup.files=[]",
        "model.build.max_length=4096",
        "rollout.max_prompt_tokens=2048",
        "rollout.max_response_tokens=2000",
        "rollout.trajectory_timeout_s=300",
        "rollout.env_timeout_s=300",
        f"data.prompts_per_step={len(toys)}",
        "data.samples_per_prompt=2",
        "environment.workers=2",
    )
    finish(process, 1500)
    assert left_over(tmp_path) == [] and containers(options) == []
    rows = [row for row in read(tmp_path / "podman" / "metrics.jsonl") if row["step"] > 0]
    trajectories = parquet.read(tmp_path / "podman" / "trajectories" / "step_000001.parquet")
    assert [row["step"] for row in rows] == [1] and len(trajectories) == 4
    for t in trajectories:
        assert t.status in (Status.COMPLETED, Status.TRUNCATED_TURNS, Status.TRUNCATED_TOKENS), t.metadata
        assert t.reward == 0.0 and t.metadata["tests"] == "failed" and t.metrics["agent_requests"] >= 1
    assert rows[0]["mismatch/logprob_abs_mean"] < 1e-3
