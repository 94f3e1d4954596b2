"""The environment contract, tested with the documents' own example unchanged."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import EnvironmentConfig
from skyrl_mega.envs import BaseTextEnv, BaseTextEnvStepOutput, make
from skyrl_mega.envs.registry import check_ready


def example_of_the_documents(real_data: Path) -> str:
    """Returns the source of `MultiplyEnv(BaseTextEnv)` from the document."""
    return _code_from("class MultiplyEnv(BaseTextEnv):", real_data)


def loop_of_the_documents(real_data: Path) -> str:
    """Returns the source of the loop that makes rows, without its indentation, from the document."""
    return textwrap.dedent(_code_from("for idx in range(num_examples):", real_data))


def _code_from(line: str, real_data: Path) -> str:
    text = (real_data / "seeds" / "002_bf906ddf41f05c86.txt").read_text(encoding="utf-8")
    start = text.index(line)
    return text[start : text.index("```", start)]


def test_the_documents_example_runs_as_it_stands(real_data: Path, tmp_path: Path) -> None:
    file = tmp_path / "their_env.py"
    imports = "import re\nfrom skyrl_mega.envs import BaseTextEnv, BaseTextEnvStepOutput\n"
    file.write_text(imports + example_of_the_documents(real_data), encoding="utf-8")
    config = EnvironmentConfig(classes={"multiply": f"{file}:MultiplyEnv"})
    row = {"reward_spec": {"method": "rule", "ground_truth": 6}, "extra_info": {"num_digits": 1, "split": "train"}}
    env = make("multiply", row, config)
    assert env.init([{"role": "user", "content": "2 * 3"}]) == ([{"role": "user", "content": "2 * 3"}], {})
    right = env.step(r"It is \boxed{6}")
    assert right == {"observations": [], "reward": 1.0, "done": True, "metadata": {"parsed_answer": "6"}}
    assert env.step("six") == {"observations": [], "reward": 0.0, "done": True, "metadata": {"parsed_answer": None}}
    env.close()


def test_the_example_of_our_own_page_runs(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "environments.md").read_text(encoding="utf-8")
    start = page.index("```python") + len("```python")
    (tmp_path / "my_env.py").write_text(page[start : page.index("```", start)], encoding="utf-8")
    config = EnvironmentConfig(classes={"my_multiply": f"{tmp_path / 'my_env.py'}:MultiplyEnv"})
    env = make("my_multiply", {"reward_spec": {"ground_truth": 6}}, config)
    assert [env.step(a)["reward"] for a in (r"\boxed{6}", r"\boxed{7}", "6")] == [1.0, 0.0, 0.0]


def test_extras_options_and_turns_reach_the_environment() -> None:
    path = f"{__name__}:Free"
    config = EnvironmentConfig(classes={"free": path}, options={"free": {"temper": 1}})
    env = make("free", {"reward_spec": {"ground_truth": "3"}, "data_source": "d"}, config, max_turns=4)
    assert (env.ground_truth, env.max_turns, env.extras["max_turns"], env.turns) == ("3", 4, 4, 0)
    assert env.extras["data_source"] == "d" and env.env_config == env.options == {"temper": 1}


class Free(BaseTextEnv):
    """An environment without declared options, open to any option."""

    def step(self, action: str) -> BaseTextEnvStepOutput:
        return BaseTextEnvStepOutput(observations=[], reward=0.0, done=True, metadata={})


def test_without_a_step_it_says_whose() -> None:
    class Half(BaseTextEnv):
        pass

    with pytest.raises(NotImplementedError, match=r"Half\.step"):
        Half().step("")


@pytest.mark.parametrize(
    "action, reward",
    [
        ("so #### 1,234", 1),
        ("#### 1234", 1),
        ("#### 1234\n#### 9", 1),
        ("#### 9 no, #### 1234", 0),
        ("1234", 0),
        ("####1234", 0),
        ("#### 12345", 0),
        ("#### -1234", 0),
        ("", 0),
    ],
)
def test_gsm8k_is_strict(action: str, reward: float) -> None:
    output = make("gsm8k", {"reward_spec": {"ground_truth": "1234"}}, EnvironmentConfig()).step(action)
    assert (output["reward"], output["done"]) == (reward, True)


@pytest.mark.parametrize("name", ["gsm8k", "gsm8k_multi_turn"])
@pytest.mark.parametrize(
    "gold, action, reward",
    [("1,234", "#### 1,234", 1), ("1,234", "#### 1234", 1), ("$1,234", "#### 1234", 1), ("35", "#### 3.5", 0),
     ("3.5", "#### 35", 0), ("1234", "#### 1.234", 0), (18, "#### 18", 1)],
)  # fmt: skip
def test_gsm8k_reads_gold_as_it_reads_an_answer(name: str, gold: object, action: str, reward: float) -> None:
    output = make(name, {"reward_spec": {"ground_truth": gold}}, EnvironmentConfig(), max_turns=1).step(action)
    assert (output["reward"] == 1) == (reward == 1)


@pytest.mark.parametrize("action, reward", [("58", 1), (" 58\n", 1), ("85", 0), ("580", 0), ("", 0), ("5 8", 0)])
def test_addition_is_exact(action: str, reward: float) -> None:
    assert (
        make("addition", {"reward_spec": {"ground_truth": "58"}}, EnvironmentConfig()).step(action)["reward"] == reward
    )


def test_multiply_over_several_turns() -> None:
    env = make("multiply", {"reward_spec": {"ground_truth": "6"}}, EnvironmentConfig(), max_turns=3)
    first = env.step(r"\boxed{5}")
    assert (first["reward"], first["done"], first["observations"][0]["role"]) == (0.0, False, "user")
    assert env.step("six")["observations"] != first["observations"]
    last = env.step(r"\boxed{7}")
    assert (last["done"], last["observations"]) == (True, [])


def test_multiply_ends_with_a_right_answer() -> None:
    env = make("multiply", {"reward_spec": {"ground_truth": "6"}}, EnvironmentConfig(), max_turns=3)
    assert env.step(r"\boxed{ 6 }") == {
        "observations": [],
        "reward": 1.0,
        "done": True,
        "metadata": {"parsed_answer": "6"},
    }


def test_multiply_may_make_later_answers_worth_less() -> None:
    config = EnvironmentConfig(options={"multiply": {"discount": 0.5}})
    env = make("multiply", {"reward_spec": {"ground_truth": "6"}}, config, max_turns=3)
    assert [env.step(rf"\boxed{{{answer}}}")["reward"] for answer in (5, 7, 6)] == [0.0, 0.0, 0.25]


@pytest.mark.parametrize("options", [{"discount": 0}, {"discount": 1.1}, {"discount": "half"}, {"discount": True}])
def test_a_discount_that_is_none(options: dict[str, object]) -> None:
    with pytest.raises(
        UserError, match=r"environment\.options\.multiply\.discount = .*allowed is a number above 0 and at most 1"
    ):
        check_ready("multiply", EnvironmentConfig(options={"multiply": options}))
