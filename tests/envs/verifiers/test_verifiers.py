"""Environments of verifiers: their tasks as rows, their rollouts, rewards, metrics and failures."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import EnvironmentConfig
from skyrl_mega.data.prepare import prepare
from skyrl_mega.envs import AgentStopped, BaseTextEnvStepOutput, InfrastructureFault, registry
from skyrl_mega.envs.sandbox import confinements
from skyrl_mega.envs.verifiers import runner
from skyrl_mega.envs.verifiers.env import VerifiersEnv, VerifiersFailed, failure
from tests.envs.harness.policy import KEY, Policy, answering
from tests.envs.verifiers.installation import install

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="programs are ended by means of Linux")
SUM = {"prompt": [{"role": "user", "content": "2+2"}], "answer": "4"}
ADD = {"idx": 2, "prompt": "2+2", "answer": "4"}
NULL = {"solver": {"harness": "null"}, "judge": {"harness": "null"}}
"""Agents of the task set that run no code."""
Play = Callable[..., BaseTextEnvStepOutput]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("installation")
    folder.chmod(0o755)
    return str(install(folder))


@pytest.fixture
def policy() -> Iterator[Policy]:
    with answering("4") as policy:
        yield policy


@pytest.fixture
def play(python: str, policy: Policy) -> Play:
    """Returns a function that plays a task of an environment, unconfined if not said otherwise."""

    def played(env: str, task: dict[str, Any], **options: Any) -> BaseTextEnvStepOutput:
        extras = {"extra_info": {"env": env, "task": json.dumps(task)}, "max_turns": 3}
        given = {"env": env, "python": python, "confined": False, "timeout_s": 60, "scoring_s": 60, **options}
        return VerifiersEnv(given, extras).run(policy.endpoint, [])

    return played


def refused(python: str, env: str, args: dict[str, Any] | None = None, **options: Any) -> str:
    given = {"env": env, "args": args or {}, "python": python, "confined": False, **options}
    with pytest.raises(UserError) as error:
        registry.check_ready("verifiers", EnvironmentConfig(options={"verifiers": given}))
    return str(error.value)


@pytest.mark.parametrize("confined", [True, False], ids=["in the sandbox", "beside it"])
def test_a_rollout_is_judged_by_the_environment(play: Play, policy: Policy, confined: bool) -> None:
    if confined and "network namespace" not in confinements().get("network", ()):
        pytest.skip(f"this machine gives only {confinements()}")
    output = play("my-sums", SUM, confined=confined, variables={"OPENAI_API_KEY": "mine"})
    assert (output["reward"], output["done"], output["observations"]) == (1.0, True, [])
    asked = {"path": "/v1/chat/completions", "key": KEY, "model": "policy", "messages": SUM["prompt"]}
    assert policy.requests == [asked]
    metrics = dict(output["metadata"]["metrics"])
    assert metrics.pop("verifiers_s") > 0
    no_file, limit, policys_address, own_key = 0, 3, False, True
    assert metrics == {
        "files": no_file,
        "turns": limit,
        "policy": policys_address,
        "own": own_key,
        "verifiers_cut": 0.0,
    }
    assert play("my-sums", SUM | {"answer": "5"}, confined=confined)["reward"] == 0.0


def test_a_task_set_is_played_by_its_agents(play: Play, policy: Policy) -> None:
    output = play("owner/my-tasks@0.1", ADD, args=NULL)
    assert output["reward"] == 0.5  # of the two trained agents, one is right
    figures = output["metadata"]["metrics"]
    assert (figures["right"], figures["turns"]) == (0.5, 3) and "skipped" not in figures
    assert [request["messages"][0]["content"] for request in policy.requests] == ["2+2"]
    with pytest.raises(VerifiersFailed, match="agent judge is not to be trained, yet plays as the policy"):
        play("owner/my-tasks@0.1", ADD, args=NULL | {"taskset": {"apart": False}})


@pytest.mark.parametrize("kind", ["SandboxError", "TaskError"])
def test_failures_are_no_rewards(play: Play, kind: str) -> None:
    expected = InfrastructureFault if kind == "SandboxError" else VerifiersFailed
    with pytest.raises(expected, match=f"my-sums: {kind}: it broke"):
        play("my-sums", SUM, args={"fails": kind})
    with pytest.raises(expected, match=f"my-tasks: {kind}: it broke"):
        play("my-tasks", ADD, args=NULL | {"taskset": {"fails": kind}})


def test_only_an_error_of_the_agent_may_be_a_refusals() -> None:
    for kind, expected in (("ModelError", AgentStopped), ("TaskError", VerifiersFailed), ("KeyError", VerifiersFailed)):
        error = failure("my-sums", runner.failure(kind, "why")["error"])
        assert isinstance(error, expected) and str(error) == f"my-sums: {kind}: why"
        assert isinstance(error, AgentStopped) == (expected is AgentStopped)


def test_an_empty_reply_is_judged(play: Play) -> None:
    assert play("my-sums", SUM, args={"fails": "EmptyModelResponseError"})["reward"] == 1.0


def test_a_process_that_fails(play: Play) -> None:
    with pytest.raises(VerifiersFailed, match="KeyError: 'prompt'"):
        play("my-sums", {"answer": "4"})
    with pytest.raises(VerifiersFailed, match="its process ended after its time limit"):
        play("my-sums", SUM, timeout_s=0.001, scoring_s=0.001)


def test_what_is_refused_before_the_start(python: str) -> None:
    key = "environment.options.verifiers.env = "
    assert refused(python, "not-there").startswith(f"{key}not-there: it cannot be loaded: ModuleNotFoundError")
    assert "it cannot be loaded: TypeError: load_environment() got an unexpected keyword argument 'wrong'" in refused(
        python, "my-sums", {"wrong": 1}
    )
    assert refused(python, "my-sums", {"group": True}).startswith(f"{key}my-sums: its rewards compare the answers")
    assert "runs the policy's commands on this machine; give confined: true" in refused(python, "my-tasks")
    elsewhere = {"solver": {"runtime": {"type": "docker"}}}
    assert "agent solver runs in docker, out of the sandbox's reach" in refused(
        python, "my-tasks", elsewhere, confined=True
    )
    assert "there is no program /no/python" in refused("/no/python", "my-sums")
    assert "the run has no such variable" in refused(python, "my-sums", variables={"NOT_SET_ANYWHERE": None})
    with pytest.raises(UserError, match="allowed: name, owner/name"):
        registry.check_options("verifiers", EnvironmentConfig(options={"verifiers": {"env": "a b"}}))
    registry.check_ready("verifiers", EnvironmentConfig(options={"verifiers": {"env": "my-sums", "python": python}}))


@pytest.mark.parametrize(
    "args, expected",
    [
        ({}, (["0+0", "1+1", "2+2"], ["3+3", "4+4"])),
        ({"held_out": 1}, (["0+0", "1+1", "2+2"], ["0+0"])),
        ({"numbers": 4}, (["0+0", "1+1", "2+2"], [])),
    ],
    ids=["tasks after the training rows", "evaluation data of its own", "few tasks"],
)
def test_the_rows_are_its_tasks(
    python: str, tmp_path: Path, args: dict[str, Any], expected: tuple[list[str], list[str]]
) -> None:
    words = ["verifiers", "--env", "my-sums", "--args", json.dumps(args), "--python", python, "--train", "3"]
    files = prepare([*words, "--test", "2", "--output", str(tmp_path)])
    rows = [pq.read_table(file).to_pylist() for file in files]
    prompts = [[row["prompt"][0]["content"] for row in table] for table in rows]
    assert prompts == [table for table in expected if table]
    first = rows[0][2]
    assert (first["env_class"], first["data_source"]) == ("verifiers", "my-sums")
    assert json.loads(first["extra_info"]["task"]) == SUM
    options = registry.check_options("verifiers", EnvironmentConfig(options={"verifiers": {"env": "my-sums"}}))
    assert VerifiersEnv.wrong_row(first, options) is None
    assert "extra_info.env = my-sums" in str(VerifiersEnv.wrong_row(first, {**options, "env": "other"}))
    assert "extra_info.task" in str(VerifiersEnv.wrong_row({"extra_info": {"task": "4"}}, options))


@pytest.mark.parametrize("place", ["subprocess", "docker"])
def test_the_rows_of_a_task_set(python: str, tmp_path: Path, place: str) -> None:
    args = json.dumps({"solver": {"runtime": {"type": place}}})
    words = ["verifiers", "--env", "my-tasks", "--args", args, "--python", python, "--train", "2", "--test", "1"]
    train, test = (pq.read_table(file).to_pylist() for file in prepare([*words, "--output", str(tmp_path)]))
    assert train[1]["prompt"] == [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1"}]
    assert json.loads(test[0]["extra_info"]["task"])["answer"] == "4"


def test_tasks_that_cannot_be_listed(python: str, tmp_path: Path) -> None:
    words = ["verifiers", "--env", "not-there", "--python", python, "--output", str(tmp_path)]
    with pytest.raises(UserError, match="it cannot be loaded: ModuleNotFoundError") as error:
        prepare(words)
    assert "sandbox" not in str(error.value), "the tasks are listed outside of the sandbox"


def test_the_page_lists_all_options() -> None:
    page = (Path(__file__).parents[3] / "docs" / "agents.md").read_text(encoding="utf-8")
    section = page.partition("| option of `environment.options.verifiers`")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == list(VerifiersEnv.OPTIONS)


def test_scripts_run_with_the_interpreter_that_has_their_packages() -> None:
    header = "# /// script\n# requires-python = '>=3.10'\n# dependencies = {}\n# ///\nprint(1)\n"
    assert runner.has_packages("print(1)")
    assert runner.has_packages(header.format('["pytest>=7", "PyYAML"]'))
    assert runner.has_packages(header.format('[\n#   "pytest",\n# ]'))
    assert not runner.has_packages(header.format('["pytest", "pytest>999"]'))
    assert not runner.has_packages(header.format('["no-such-package-anywhere"]'))


def test_prompts_are_shown_as_text() -> None:
    image = {"type": "image_url", "image_url": {}}
    parts = [{"type": "text", "text": "See"}, image]
    assert runner.messages([{"role": "user", "content": parts}]) == [{"role": "user", "content": "See\n[image_url]"}]
    assert runner.messages("Add.") == [{"role": "user", "content": "Add."}]
    assert runner.messages(None)[0]["content"] == runner.OPENING
