"""Judging of any text by the policy: an error of the judge would remove the trajectory from the loss."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from skyrl_mega.config.schema import EnvironmentConfig
from skyrl_mega.envs import make, validate
from skyrl_mega.envs.lcb.judge import _same_value

CALL = {"input": "1", "output": "1", "testtype": "functional", "metadata": {"func_name": "f"}}
PROGRAM = "```python\n{}\n```"


@pytest.mark.parametrize(
    "code",
    [
        "def f(n):\n    return 10 ** 5000",
        "def f(n):\n    import os\n    os.write(3, b'[' * 60000 + b']' * 60000)\n    os._exit(0)",
        "def f(n):\n    return '\\ud800'",
        "def f(n):\n    return float('nan')",
        "def f(n):\n    return '\0'",
        "def f(n):\n    return {1: {2}}",
        "\ud800",
    ],
)
def test_programs(code: str) -> None:
    env = make("lcb", {"reward_spec": {"ground_truth": json.dumps([CALL])}}, EnvironmentConfig())
    output = validate.step(env, PROGRAM.format(code))
    assert output.reward == 0 and output.done


def test_what_a_function_printed() -> None:
    for printed in ("1" * 5000, "[" * 60_000 + "]" * 60_000, "[" * 900 + "]" * 900, "{", "NaN", "1e999"):
        assert _same_value(printed, "1") is False


@pytest.mark.parametrize(
    "text",
    [
        "<bash>echo \0</bash>",
        f"<bash>echo {'x' * 200_000}</bash>",
        "<bash>echo \ud800</bash>",
        "<bash></bash>",
        "\ud800",
    ],
    ids=["nul", "long", "surrogate", "empty", "none"],
)
def test_commands(text: str, tmp_path: Path) -> None:
    (tmp_path / "t" / "repo").mkdir(parents=True)
    row = {"reward_spec": {"ground_truth": "true"}, "extra_info": {"task": "t"}}
    env = make("swe", row, EnvironmentConfig(options={"swe": {"tasks": str(tmp_path)}}), 3)
    validate.init(env, [{"role": "user", "content": "x"}])
    output = validate.step(env, text)
    assert not output.done and output.observations
    env.close()


@pytest.mark.parametrize("name", ["math", "aime", "gsm8k", "multiply", "addition", "python", "text2sql"])
def test_answers_that_are_no_unicode(name: str, tmp_path: Path) -> None:
    (tmp_path / "db").mkdir()
    (tmp_path / "db" / "db.sqlite").touch()
    config = EnvironmentConfig(options={"text2sql": {"db_path": str(tmp_path)}})
    for bad in ("\ud800", "\0"):
        env = make(name, {"reward_spec": {"ground_truth": "1"}, "db_id": "db"}, config, 1)
        text = f"<think>x</think><solution>{bad}</solution> #### {bad} <answer>{bad}</answer> \\boxed{{{bad}}}"
        assert validate.step(env, text).reward <= 0
