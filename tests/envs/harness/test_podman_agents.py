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
from tests.envs.swe.test_podman_tasks import archive_of, containers
from tests.envs.swe.toys import PATIENT, Toy, write_toys
from tests.rollout.endpoint.fakes import running_loop
from tests.rollout.endpoint.test_mini_swe_agent import MINI, TalkingSession, calling, installed
from tests.support.containers import IMAGE, podman_options, remove_store

pytestmark = [installed, pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(1800)]
ROOT = Path(__file__).parents[3]


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
