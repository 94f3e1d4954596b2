"""Tracing of a fault to the line of the user's own file, at any depth of other code."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyrl_mega.config.schema import EnvironmentConfig
from skyrl_mega.envs import registry, validate
from skyrl_mega.envs.blame import fault_location

SOURCE = """import json
from skyrl_mega.envs import BaseTextEnv

def parse(text):
    return json.loads(text)

class Mine(BaseTextEnv):
    def init(self, prompt):
        return 3

    def step(self, action):
        return parse(action)
"""


def test_the_innermost_line_that_is_the_users(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(SOURCE)
    config = EnvironmentConfig(classes={"mine": f"{file}:Mine"})
    env = registry.make("mine", {}, config)
    with pytest.raises(ValueError) as raised:
        validate.step(env, "{")  # json raises, four frames below
    assert fault_location(raised.value, "mine", config) == f"{file}, line 5, in parse: return json.loads(text)"
    with pytest.raises(validate.BadOutput) as refused:
        validate.init(env, [])
    for error in (refused.value, None):  # a wrong result or a timeout: no line of the environment raised
        assert fault_location(error, "mine", config) == f"{file}, line 11, in step"


def test_a_built_in_environment_is_its_own_file() -> None:
    config = EnvironmentConfig()
    env = registry.make("addition", {"reward_spec": {"ground_truth": "1"}}, config)
    del env.ground_truth
    with pytest.raises(AttributeError) as raised:
        validate.step(env, "1")
    at = fault_location(raised.value, "addition", config)
    assert at and "envs/addition/env.py, line " in at
    assert fault_location(raised.value, "unknown", config) is None
