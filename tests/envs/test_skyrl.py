"""Environments written for SkyRL, run as they are, import line included, through the agent loop."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import EnvironmentConfig
from skyrl_mega.envs import registry, skyrl_gym
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.models.char_tokenizer import EOS
from skyrl_mega.rollout.agent.renderer import Renderer
from skyrl_mega.trainer.run import rollout_metrics
from skyrl_mega.trajectories.trajectory import Status, Trajectory
from tests.support.scripted import Scripted, play

QUESTION = [{"role": "user", "content": "a question"}]
PATHS = {
    "multiply": "tests/envs/for_skyrl/multiply.py:MultiplyEnv",
    "word_problem": "tests.envs.for_skyrl.word_problem:WordProblemEnv",
    "retry": "tests.envs.for_skyrl.retry:RetryEnv",
    "lookup": "tests/envs/for_skyrl/search.py:SearchEnv",
    "judged": "tests/envs/for_skyrl/judged.py:JudgedEnv",
}
OPTIONS = {"lookup": {"topk": 1}, "judged": {"model": "judge-large", "strict": False}}
CONFIG = EnvironmentConfig(classes=PATHS, options=OPTIONS)


def played(
    chat: Renderer, name: str, truth: Any, conversations: list[list[str]], config: EnvironmentConfig = CONFIG
) -> list[Trajectory]:
    """Plays a row once for each list of answers, at most three turns."""
    extras = {"data_source": name, "reward_spec": {"method": "rule", "ground_truth": truth}, "extra_info": {}}
    prompt = Prompt(0, QUESTION, name, extras)
    scripts = [(prompt, Scripted(chat, [f"{line}{EOS}" for line in lines])) for lines in conversations]
    return play(chat, config, scripts, turns=3)


def rewards(trajectories: list[Trajectory]) -> list[tuple[float, int]]:
    assert {t.status for t in trajectories} == {Status.COMPLETED}, [t.metadata for t in trajectories]
    return [(t.reward, t.turns) for t in trajectories]


def test_products_over_several_turns(characters_chat: Renderer) -> None:
    wrong, right = "\\boxed{7}", "It is \\boxed{6}"
    turns = played(characters_chat, "multiply", 6, [[right], [wrong, right], [wrong] * 3, ["?"] * 3])
    assert rewards(turns) == [(1.0, 1), (1.0, 2), (0.5, 3), (0.0, 3)]
    assert turns[1].messages[2] == {"role": "user", "content": "Your answer '7' is incorrect."}
    assert turns[2].metadata["parsed_answer"] == "7"


def test_a_single_turn_that_registers_itself(characters_chat: Renderer) -> None:
    assert rewards(played(characters_chat, "word_problem", "1800", [["#### 1,800"], ["1800"]])) == [(1.0, 1), (0.0, 1)]


def test_rewards_of_turns_and_figures(characters_chat: Renderer) -> None:
    both = played(characters_chat, "retry", "4", [["#### 3", "#### 4"], ["#### 5"] * 3])
    assert [t.reward for t in both] == pytest.approx([0.2 / 3 + 1.0, 0.2])
    assert both[0].messages[0]["role"] == "system"
    metrics = rollout_metrics(both)
    assert (metrics["environment/of/steps"], metrics["environment/of/acc"]) == (2.5, 0.5)
    assert "environment/of/kind" not in metrics


def test_tools_in_groups_and_settings_by_attribute(characters_chat: Renderer) -> None:
    search, answer = "<search>paris</search>", "<answer>Paris</answer>"
    turns = played(characters_chat, "lookup", {"target": "Paris"}, [[search, answer], ["hm", answer], [search] * 3])
    assert rewards(turns) == [(1.0, 2), (1.0, 2), (0.0, 3)]
    replies = [t.messages[2]["content"] for t in turns[:2]]
    assert replies == ["<information>The capital of France is Paris.</information>", "no query"]


def test_a_judge_and_the_text_given_back(characters_chat: Renderer) -> None:
    assert rewards(played(characters_chat, "judged", "gold", [["is gold"], ["no"]])) == [(1.0, 1), (0.0, 1)]
    strict = EnvironmentConfig(classes=PATHS, options={"judged": {"model": "judge-large", "strict": True}})
    (changed,) = played(characters_chat, "judged", "gold", [[" gold "]], strict)
    assert changed.status is Status.ERROR_ENV and "postprocessed_action differs" in changed.metadata["error"]


def test_a_fault_is_blamed_on_the_users_line(characters_chat: Renderer) -> None:
    other = EnvironmentConfig(classes=PATHS, options={"judged": {"model": "other", "strict": False}})
    (failed,) = played(characters_chat, "judged", "gold", [["gold"]], other)
    assert failed.status is Status.ERROR_ENV and "AssertionError" in failed.metadata["error"]
    assert "for_skyrl/judged.py, line " in failed.metadata["at"] and "judge-large" in failed.metadata["at"]


def test_the_stand_in_is_for_users_files_alone(tmp_path: Path) -> None:
    assert importlib.util.find_spec("skyrl_gym") is None
    registry.check(CONFIG)
    assert not [name for name in sys.modules if name.partition(".")[0] == "skyrl_gym"]
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("skyrl_gym.envs.base_text_env")
    file = tmp_path / "mine.py"
    for line in ("from skyrl_gym.tools import SearchToolGroup", "from skyrl_gym.envs.gsm8k import utils"):
        file.write_text(line + "\n")
        with pytest.raises(UserError, match=r"mine.py, line 1 cannot .*skyrl_gym is not installed, and its stand-in"):
            registry.resolve("mine", EnvironmentConfig(classes={"mine": f"{file}:Mine"}))
    file.write_text("from skyrl_gym.envs.base_text_env import BaseTextEnv\nclass Mine(BaseTextEnv):\n    pass\n")
    with pytest.raises(UserError, match=r"environment\.classes\.mine: Mine has no step"):
        registry.resolve("mine", EnvironmentConfig(classes={"mine": f"{file}:Mine"}))


def test_a_class_that_cannot_be_called_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "wrong.py"
    file.write_text(
        "from skyrl_gym.envs.base_text_env import BaseTextEnv\n"
        "class Unmade(BaseTextEnv):\n    def step(self, action):\n        pass\n"
        "class Deaf(Unmade):\n    def __init__(self, env_config, extras):\n        pass\n"
        "    def step(self):\n        pass\n"
    )
    for name, problem in (("Unmade", "Unmade cannot be created by "), ("Deaf", "Deaf.step cannot be called by ")):
        with pytest.raises(UserError, match=rf"environment\.classes\.mine = .*wrong\.py:{name}: {problem}"):
            registry.check(EnvironmentConfig(classes={"mine": f"{file}:{name}"}))


def test_an_installed_package_is_used(
    characters_chat: Renderer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Builds a package `skyrl_gym` that marks the rewards of its environments."""
    package = tmp_path / "skyrl_gym" / "envs"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").write_text("")
    (package / "base_text_env.py").write_text(
        "BaseTextEnvStepOutput = dict\n"
        "class BaseTextEnv:\n"
        "    installed = True\n"
        "    def init(self, prompt):\n        return prompt, {}\n"
        "    def close(self):\n        pass\n"
    )
    file = tmp_path / "mine.py"
    file.write_text(
        "from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput\n"
        "class Mine(BaseTextEnv):\n"
        "    def __init__(self, env_config, extras):\n        self.bonus = env_config.bonus\n"
        "    def step(self, action):\n"
        "        reward = self.bonus + self.installed\n"
        "        return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata=None)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = EnvironmentConfig(classes={"mine": f"{file}:Mine"}, options={"mine": {"bonus": 0.5}})
    try:
        assert rewards(played(characters_chat, "mine", None, [["a"]], config)) == [(1.5, 1)]
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "skyrl_gym"]:
            del sys.modules[name]


def test_the_registry_of_the_stand_in() -> None:
    skyrl_gym.register(id="twice", entry_point=lambda **kwargs: kwargs, kwargs={"a": 1})
    with pytest.raises(skyrl_gym.RegistrationError, match="registered twice"):
        skyrl_gym.register(id="twice", entry_point="a:B")
    assert skyrl_gym.make("twice", b=2) == {"a": 1, "b": 2}
    skyrl_gym.deregister("twice")
    with pytest.raises(skyrl_gym.Error, match="no environment 'twice' is registered"):
        skyrl_gym.make("twice")
    assert skyrl_gym.default_aggregate_metrics([{"a": 1, "b": "x"}, {"a": 2.0}, {}]) == {"a": 1.5}
