"""The adapter for gymnasium, tested with environments registered by the tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import EnvironmentConfig
from skyrl_mega.data.prepare import prepare
from skyrl_mega.data.rows import load_prompts
from skyrl_mega.envs import BaseTextEnv, make

gymnasium = pytest.importorskip("gymnasium")
GUESS = {"id": "tests/Guess-v0", "module": "tests.envs.gym.own_gym"}


def game(seed: int = 1, **options: Any) -> BaseTextEnv:
    config = EnvironmentConfig(options={"gym": {**GUESS, **options}})
    return make("gym", {"extra_info": {"seed": seed}}, config, 5)


def test_a_conversation_is_the_environments_own() -> None:
    env = game(seed=4)
    messages, info = env.init([{"role": "system", "content": "s"}])
    assert messages[1:] == [{"role": "user", "content": "Guess a number from 1 to 9."}] and info == {"tries": 3}
    reference = gymnasium.make(GUESS["id"])
    reference.reset(seed=4)
    for guess in (1, 9):
        observation, reward, terminated, truncated, info = reference.step(guess)
        output = env.step(f"<action>0</action> no, <action> {guess} </action>")
        assert output["observations"] == [{"role": "user", "content": observation}]
        assert (output["reward"], output["done"]) == (reward, terminated or truncated)
        assert output["metadata"]["number"] == info["number"] and "rest" not in output["metadata"]
    last = env.step(f"<action>{info['number']}</action>")
    assert (last["reward"], last["done"], last["observations"]) == (1.0, True, [])
    env.close()


def test_seeds_decide_and_prompts_are_kept() -> None:
    numbers = []
    for seed in (1, 1, 2, 3):
        env = game(seed)
        messages, _ = env.init([{"role": "user", "content": "Play."}])
        assert messages == [{"role": "user", "content": "Play.\n\nGuess a number from 1 to 9."}]
        numbers.append(env.step("<action>1</action>")["metadata"]["number"])
    assert numbers[0] == numbers[1] and len(set(numbers)) > 1


@pytest.mark.parametrize("text", ["five", "<action>ten</action>", "<action>0</action>", "<action>10</action>"])
def test_what_is_no_action(text: str) -> None:
    env = game(invalid_reward=-0.5)
    env.init([])
    output = env.step(text)
    assert (output["reward"], output["done"]) == (-0.5, False) and "action" in output["observations"][0]["content"]
    strict = game(invalid_ends=True)
    strict.init([])
    assert strict.step(text)["done"]


def test_text_actions_and_the_whole_text() -> None:
    env = game(id="tests/Echo-v0", tag="")
    env.init([])
    assert env.step("hello")["reward"] == 5.0
    env = game(id="tests/Echo-v0")
    env.init([])
    assert not env.step("<action>longer than ten characters</action>")["done"]


def test_arguments_reach_it() -> None:
    env = game(kwargs={"best": 7.0})
    env.init([])
    number = env.step("<action>5</action>")["metadata"]["number"]
    assert number == 5 or env.step(f"<action>{number}</action>")["reward"] == 7.0


@pytest.mark.parametrize(
    "options, said",
    [
        ({}, "id is not set"),
        (
            {"id": "tests/Absent-v0", "module": GUESS["module"]},
            r"id = tests/Absent-v0: .*check the id, the module that registers it .environment",
        ),
        ({"id": "x", "module": "no_such_module"}, "no_such_module"),
        ({**GUESS, "kwargs": {"worst": 1}}, "worst"),
        ({"id": "CartPole-v1"}, r"observations are ndarray; allowed: text"),
    ],
)
def test_wrong_settings_are_refused_before_the_run(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    prepare(f"gym --output {tmp_path} --train 3 --test 1")
    with pytest.raises(UserError, match=said) as caught:
        load_prompts([tmp_path / "train.parquet"], EnvironmentConfig(options={"gym": options}))
    assert "\n" not in str(caught.value)


def test_rows(tmp_path: Path) -> None:
    prepare(f"gym --output {tmp_path} --train 30 --test 10 --prompt 'Play well.'")
    config = EnvironmentConfig(options={"gym": GUESS})
    train, test = (load_prompts([tmp_path / f"{s}.parquet"], config) for s in ("train", "test"))
    seeds = [{p.extras["extra_info"]["seed"] for p in split} for split in (train, test)]
    assert [len(s) for s in seeds] == [30, 10] and seeds[0].isdisjoint(seeds[1])
    env = make("gym", train[0].extras, config, 3)
    messages, _ = env.init(train[0].messages)
    assert [m["role"] for m in messages] == ["system", "user"] and messages[0]["content"] == "Play well."
