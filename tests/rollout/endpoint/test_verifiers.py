"""Two environments of the package index, played unmodified by `verifiers` where it is installed."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from skyrl_mega.config.schema import EnvironmentConfig
from skyrl_mega.data.prepare import prepare
from skyrl_mega.envs import BaseTextEnvStepOutput, registry
from skyrl_mega.envs.agent import AgentEndpoint, AgentEnv
from skyrl_mega.envs.sandbox import confinements
from skyrl_mega.rollout.endpoint.requests import EndpointSession
from tests.rollout.endpoint.fakes import PLAIN, ScriptedSession

ROOT = Path(__file__).parents[3]
NEW, OLD = (str(ROOT / f".venv-verifiers{suffix}" / "bin" / "python") for suffix in ("", "-0.1"))
"""`python -m venv .venv-verifiers; .venv-verifiers/bin/pip install verifiers==0.4.0 marble-v1`, and
`python -m venv .venv-verifiers-0.1; .venv-verifiers-0.1/bin/pip install verifiers==0.1.14 staros-stardata`."""
POEMS = "stardata.envs.constraint_gym"
Play = Callable[[Any, dict[str, Any], str], BaseTextEnvStepOutput]

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(
        "network namespace" not in confinements().get("network", ()), reason="this machine cannot confine an agent"
    ),
]


def rows(tmp_path: Path, env: str, python: str) -> list[dict[str, Any]]:
    words = ["verifiers", "--env", env, "--python", python, "--train", "2", "--test", "1", "--output", str(tmp_path)]
    tables: list[dict[str, Any]] = pq.read_table(prepare(words)[0]).to_pylist()
    return tables


@pytest.fixture
def play(opened: Callable[[EndpointSession], AgentEndpoint]) -> Play:
    """Returns a function that plays a row in the sandbox with a policy that always says the same."""

    def played(options: Any, row: dict[str, Any], text: str) -> BaseTextEnvStepOutput:
        config = EnvironmentConfig(options={"verifiers": options})
        env = registry.make("verifiers", row, config, 3)
        assert isinstance(env, AgentEnv)
        session = ScriptedSession(replace(PLAIN, text=text, content=text))
        output = env.run(opened(session), row["prompt"])
        assert [request.messages for request in session.requests] == [row["prompt"]]  # type: ignore[union-attr]
        return output

    return played


@pytest.mark.skipif(not Path(NEW).exists(), reason="verifiers 0.4 is not installed in .venv-verifiers")
def test_a_task_set(tmp_path: Path, play: Play) -> None:
    options = {"env": "marble-v1", "python": NEW, "args": {"agent": {"harness": {"id": "null"}}}}
    registry.check_ready("verifiers", EnvironmentConfig(options={"verifiers": options}))
    row = rows(tmp_path, "marble-v1", NEW)[1]
    solution = json.dumps(json.loads(row["extra_info"]["task"])["solution"])
    right = play(options, row, f"Like this:\n```json\n{solution}\n```")
    wrong = play(options, row, "I cannot.")
    assert (right["reward"], wrong["reward"]) == (1.0, 0.0)
    scores = ("scored", "answered_legally", "closeness")
    assert [right["metadata"]["metrics"][name] for name in scores] == [1.0, 1.0, 1.0]
    assert [wrong["metadata"]["metrics"][name] for name in scores] == [0.0, 0.0, 0.0]


@pytest.mark.skipif(not Path(OLD).exists(), reason="verifiers 0.1 is not installed in .venv-verifiers-0.1")
def test_an_environment_with_load_environment(tmp_path: Path, play: Play) -> None:
    options = {"env": POEMS, "python": OLD}
    row = rows(tmp_path, POEMS, OLD)[0]
    poem = "An old silent pond\nA frog jumps into the pond\nSplash! Silence again."
    spec = json.loads(row["extra_info"]["task"])["info"]
    code = (
        "import json, sys, verifiers as vf\nfrom stardata.envs.constraint_gym import prosody_reward\n"
        "given = json.load(sys.stdin)\nreply = vf.AssistantMessage(content=given['poem'])\n"
        "print(prosody_reward([reply], info=given['info']))"
    )
    given = json.dumps({"poem": poem, "info": spec})
    expected = float(subprocess.run([OLD, "-c", code], input=given, capture_output=True, text=True, check=True).stdout)
    output = play(options, row, poem)
    assert 0 < expected == output["reward"] == output["metadata"]["metrics"]["prosody_reward"]
