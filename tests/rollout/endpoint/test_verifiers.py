"""Two environments of the package index, played unmodified by `verifiers` where it is installed."""

from __future__ import annotations

import json
import subprocess
import venv
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow.parquet as pq
import pytest

from skyrl_mega.config.schema import EnvironmentConfig
from skyrl_mega.data.prepare import prepare
from skyrl_mega.envs import BaseTextEnvStepOutput, registry
from skyrl_mega.envs.agent import AgentEndpoint, AgentEnv
from skyrl_mega.envs.sandbox import confinements
from skyrl_mega.envs.tool_calls import ToolCall
from skyrl_mega.rollout.endpoint.requests import ChatRequest, EndpointSession
from tests.rollout.endpoint.fakes import PLAIN, ScriptedSession
from tests.rollout.endpoint.test_mini_swe_agent import TalkingSession

ROOT = Path(__file__).parents[3]
NEW, OLD = (str(ROOT / f".venv-verifiers{suffix}" / "bin" / "python") for suffix in ("", "-0.1"))
"""`python -m venv .venv-verifiers; .venv-verifiers/bin/pip install verifiers==0.4.0 marble-v1`, and
`python -m venv .venv-verifiers-0.1; .venv-verifiers-0.1/bin/pip install verifiers==0.1.14 staros-stardata`."""
TOOLS = """
import verifiers.v1 as vf

__all__ = ["Sums"]

class Adder(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    async def add(self, a: int, b: int) -> str:
        "Adds two numbers."
        return str(a + b)

class Data(vf.TaskData):
    answer: str

class Sum(vf.Task[Data]):
    @classmethod
    def toolsets(cls, config):
        return [Adder(vf.ToolsetConfig())]

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def tool_results(self, trace: vf.Trace) -> float:
        return float(len(trace.tool_messages))

class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    def load(self):
        for n in (20, 21):
            yield Sum(Data(prompt=f"{n}+{n}", answer=str(2 * n)), self.config.task)

if __name__ == "__main__":
    Adder.run()
"""
"""A task set with an MCP tool."""
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


@pytest.fixture
def packages() -> Path:
    """The packages of the installation of verifiers 0.4."""
    return next(Path(NEW).parents[1].resolve().glob("lib/python*/site-packages"))


@pytest.fixture
def own(packages: Path) -> Iterator[Path]:
    """An installation with the task set `my_tools`. Not below /tmp, which a program in the sandbox writes to."""
    with TemporaryDirectory(prefix=".venv-", dir=ROOT) as folder:
        Path(folder).chmod(0o755)
        venv.create(folder, symlinks=True)
        site = next(Path(folder).glob("lib/python*/site-packages"))
        (site / "my_tools.py").write_text(TOOLS)
        (site / "verifiers.pth").write_text(f"{packages}\n")
        yield Path(folder)


@pytest.mark.skipif(not Path(NEW).exists(), reason="verifiers 0.4 is not installed in .venv-verifiers")
def test_tools_over_mcp(
    opened: Callable[[EndpointSession], AgentEndpoint], own: Path, packages: Path, tmp_path: Path
) -> None:
    python = str(own / "bin" / "python")
    options = {"env": "my-tools", "python": python, "args": {"agent": {"harness": {"id": "null"}}}}
    config = EnvironmentConfig(options={"verifiers": {**options, "read": [str(packages)]}})
    row = rows(tmp_path, "my-tools", python)[0]
    call = ToolCall("call_1", "adder_add", {"a": 20, "b": 20})
    session = TalkingSession([replace(PLAIN, tool_calls=(call,)), replace(PLAIN, text="40", content="40")])
    env = registry.make("verifiers", row, config, 3)
    assert isinstance(env, AgentEnv)
    output = env.run(opened(session), row["prompt"])
    first, second = session.requests
    assert isinstance(first, ChatRequest) and isinstance(second, ChatRequest)
    assert [tool["function"]["name"] for tool in first.tools] == ["adder_add"]
    assert [message["role"] for message in second.messages] == ["user", "assistant", "tool"]
    assert second.messages[2]["content"] == "40"
    assert (output["reward"], output["metadata"]["metrics"]["tool_results"]) == (1.0, 1.0)


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
