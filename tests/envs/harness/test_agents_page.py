"""`docs/agents.md`: its agent is the one that the configuration runs, its program runs, its options are all."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import yaml

from skyrl_mega.config.schema import EnvironmentConfig
from skyrl_mega.envs import AgentEndpoint, registry
from skyrl_mega.envs.harness.env import HarnessEnv
from skyrl_mega.envs.sandbox import confinements
from skyrl_mega.telemetry.metrics import read
from tests.envs.harness.policy import answering
from tests.trainer.quickstart import left_over, user_python

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)


def test_its_class_is_the_one_of_the_configuration() -> None:
    shown = next(block for block in blocks("python") if block.startswith("class "))
    assert shown in (ROOT / "configs" / "agent_cpu.py").read_text(encoding="utf-8")
    settings = yaml.safe_load((ROOT / "configs" / "agent_cpu.yaml").read_text(encoding="utf-8"))
    given = yaml.safe_load(blocks("yaml")[0])
    assert given["environment"] == settings["environment"]
    assert given["rollout"].items() <= settings["rollout"].items()


def test_its_options_are_all_options() -> None:
    section = PAGE.partition("| option of `environment.options.harness`")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == list(HarnessEnv.OPTIONS)


def test_its_program_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "network namespace" not in confinements().get("network", ()):
        pytest.skip(f"this machine gives only {confinements()}")
    for block in blocks("python"):
        if block.startswith("# my_"):
            (tmp_path / block.split()[1]).write_text(block, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    environment = yaml.safe_load(blocks("yaml")[1])["environment"]
    config = EnvironmentConfig(**environment)
    registry.check_ready("harness", config)
    prompt = [{"role": "user", "content": "2+2"}]
    env = registry.make("harness", {"reward_spec": {"ground_truth": "4"}}, config, 4)
    assert isinstance(env, HarnessEnv)
    with answering("4") as policy:
        output = env.run(policy.endpoint, prompt)
    assert output["reward"] == 1.0 and output["metadata"]["metrics"]["characters"] == 2
    assert [len(request["messages"]) for request in policy.requests] == [2, 4]


def test_the_agent_of_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = EnvironmentConfig(classes={"agent": "configs/agent_cpu.py:CalculatorAgent"})
    env = registry.make("agent", {"reward_spec": {"ground_truth": "58"}}, config, 2)
    use = sys.modules[type(env).__module__].use_calculator
    assert use('{"expression": "27+31"}') == "58"
    assert all(use(text).startswith("Error") for text in ("{", "[]", "{}", '{"expression": 3}', '{"expression": "x"}'))
    with answering("It is 58") as policy:
        output = env.run(policy.endpoint, [{"role": "user", "content": "27+31"}])  # type: ignore[attr-defined]
        assert isinstance(policy.endpoint, AgentEndpoint)
    assert output["reward"] == 1.0 and len(policy.requests) == 1
    assert policy.requests[0]["tools"][0]["function"]["name"] == "calculate"


PROGRAM = {
    "harness": {
        "command": "python my_agent.py",
        "reward": "calculator",
        "timeout_s": 120,
        "failed_exit": "judge",
    }
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["agent", "harness"])
def test_a_run(tmp_path: Path, name: str) -> None:
    """Runs two steps of the configuration: with its class, and with the program of the page."""
    data = tmp_path / "data"
    program = next(block for block in blocks("python") if block.startswith("# my_agent.py"))
    (tmp_path / "my_agent.py").write_text(program, encoding="utf-8")
    prepare = f"calculator --output {data} --train 200 --test 8 --demonstrations 400 --env {name}"
    config = yaml.safe_load((ROOT / "configs" / "agent_cpu.yaml").read_text(encoding="utf-8"))
    config["run"] |= {"steps": 2, "directory": str(tmp_path / "runs")}
    config["model"]["path"] = str(tmp_path / "model")
    files = {key: [str(data / f"{file}.parquet")] for key, file in (("train", "train"), ("eval", "test"))}
    config["data"] |= {"prepare": prepare, **files, "prompts_per_step": 4, "samples_per_prompt": 4}
    config["warmup"] |= {"files": [str(data / "demonstrations.parquet")], "steps": 20}
    config |= {"evaluation": {"every": 2}, "checkpoint": {"every": 0}, "telemetry": {"trackers": ["jsonl"]}}
    classes = {"agent": f"{ROOT}/configs/agent_cpu.py:CalculatorAgent"}
    config["environment"] = {"options": PROGRAM} if name == "harness" else {"classes": classes}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    user_python(tmp_path, "-m", "skyrl_mega.launch", "--config", "run.yaml")
    assert left_over(tmp_path) == []
    _, *steps = read(next((tmp_path / "runs").glob("*/metrics.jsonl")))
    assert [row["step"] for row in steps] == [1, 2]
    for row in steps:
        assert row["rollout/failed_fraction"] == 0 and row["mismatch/logprob_abs_mean"] < 1e-3
        assert row["environment/of/agent_branches"] == 1 and 1 <= row["environment/of/agent_requests"] <= 2
