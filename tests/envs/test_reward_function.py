"""Reward functions written for verl and TRL, run as they are on verl's rows, through the agent loop."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import EnvironmentConfig
from skyrl_mega.data.rows import check_files, environments_of, load_prompts
from skyrl_mega.envs import registry
from skyrl_mega.models.char_tokenizer import EOS
from skyrl_mega.rollout.agent.env_pool import Call
from skyrl_mega.rollout.agent.renderer import Renderer
from skyrl_mega.trainer.evaluation import scores
from skyrl_mega.trainer.run import rollout_metrics
from skyrl_mega.trajectories.trajectory import Status, Trajectory
from tests.support.scripted import Scripted, play

FILE = "tests/envs/user_reward_functions.py"


def config_of(function: str, **kwargs: Any) -> EnvironmentConfig:
    options = {"reward_function": kwargs} if kwargs else {}
    return EnvironmentConfig(reward_function=f"{FILE}:{function}", options=options)


def verl_rows(path: Path, source: str, truth: Any, **columns: Any) -> Path:
    """Writes a file with one row in verl's columns."""
    row = {
        "data_source": source,
        "prompt": [{"role": "user", "content": "a question of words"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": "train", "index": 0, "question": "a question of words"},
    }
    pq.write_table(pa.Table.from_pylist([row | columns]), path)
    return path


def judged(chat: Renderer, config: EnvironmentConfig, file: Path, answers: list[str]) -> list[Trajectory]:
    """Plays the file's row once for each answer."""
    (prompt,) = load_prompts([file], config)
    return play(chat, config, [(prompt, Scripted(chat, [f"{answer}{EOS}"])) for answer in answers])


CASES: dict[str, tuple[str, Any, dict[str, Any], dict[str, float]]] = {
    "gsm8k_strict": ("openai/gsm8k", "1800", {}, {"So #### 1,800": 1.0, "#### 18": 0.0, "1800": 0.0}),
    "math_with_accuracy": ("math_dapo", "34", {}, {"Answer: 34": 1.0, "Answer: 3": -1.0, "34": -1.0}),
    "countdown": (
        "countdown",
        {"target": 10, "numbers": [2, 3, 4]},
        {"format_score": 0.25},
        {"<answer>4 + 2 * 3</answer>": 1.0, "<answer>4 + 2 + 3</answer>": 0.25, "<answer>ten</answer>": 0.0},
    ),
    "judge": ("open", "", {"threshold": 0.75}, {"words of a question": 1.0, "a question": 0.0}),
    "by_source": (
        "geometry",
        "5",
        {"weights": {"answer": 0.9, "format": 0.1}},
        {"<think>a</think>\\boxed{5}": 1.0, "\\boxed{5}": 0.9, "<think>a</think>4": 0.1},
    ),
}
"""Function → data source, ground truth, `reward_kwargs`, and answer → reward."""


@pytest.mark.parametrize("function", CASES)
def test_a_function_for_verl_runs_as_it_is(characters_chat: Renderer, tmp_path: Path, function: str) -> None:
    source, truth, kwargs, rewards = CASES[function]
    file = verl_rows(tmp_path / "train.parquet", source, truth)
    played = judged(characters_chat, config_of(function, **kwargs), file, list(rewards))
    assert [t.status for t in played] == [Status.COMPLETED] * len(rewards), [t.metadata for t in played]
    assert [t.reward for t in played] == pytest.approx(list(rewards.values()))
    assert {(t.turns, t.prompt.env_class) for t in played} == {(1, "reward_function")}


def test_further_entries_are_metadata_and_metrics(characters_chat: Renderer, tmp_path: Path) -> None:
    file = verl_rows(tmp_path / "train.parquet", "math_dapo", "34")
    played = judged(characters_chat, config_of("math_with_accuracy"), file, ["Answer: 34", "no"])
    assert [t.metadata["pred"] for t in played] == ["34", "[INVALID]"]
    assert rollout_metrics(played)["environment/of/acc"] == 0.5
    assert "environment/of/pred" not in rollout_metrics(played)
    assert scores(played)["eval/math_dapo/of/acc"] == 0.5
    asked = judged(characters_chat, config_of("judge"), file, ["a question", "a question"])
    assert [t.metrics for t in asked] == [{"overlap": 0.5, "asked": 1.0}] * 2  # samples share no extra_info
    asked[0].metadata["metrics"]["large"] = 10**400
    assert "large" not in asked[0].metrics


def test_a_function_for_trl_runs_as_it_is(characters_chat: Renderer, tmp_path: Path) -> None:
    file = verl_rows(tmp_path / "train.parquet", "any", None, solution="42")
    letters = judged(characters_chat, config_of("unique_letters"), file, ["abca", "a"])
    assert [t.reward for t in letters] == [3.0, 1.0]
    answers = judged(characters_chat, config_of("accuracy"), file, ["it is 42", "it is 4"])
    assert [t.reward for t in answers] == [1.0, 0.0]


def test_a_fault_is_the_functions(characters_chat: Renderer, tmp_path: Path) -> None:
    file = verl_rows(tmp_path / "train.parquet", "any", "1")
    fine, raised, wrong = judged(characters_chat, config_of("broken"), file, ["2.5", "two", "dict"])
    assert (fine.status, fine.reward) == (Status.COMPLETED, 2.5)
    assert raised.status is wrong.status is Status.ERROR_ENV
    assert "step raised ValueError" in raised.metadata["error"]
    assert FILE in raised.metadata["at"] and raised.metadata["at"].endswith("float(solution_str)")
    assert "a dict without score" in wrong.metadata["error"] and wrong.metadata["at"].endswith("in broken")


@pytest.mark.parametrize(
    "config, words",
    [
        (config_of("gsm8k_strct"), "has no function gsm8k_strct; did you mean gsm8k_strict?"),
        (config_of("other_form"), "other_form takes answer, truth; allowed: `compute_score(data_source"),
        (config_of("gsm8k_strict", bonus=1), "ground_truth, extra_info, bonus: got an unexpected keyword argument"),
        (config_of("accuracy", threshold=1), None),
        (config_of("no_prompts"), "no_prompts cannot be called with prompts, completions: got an unexpected keyword"),
        (config_of("Scorer"), "Scorer is a class; allowed: `compute_score(data_source"),
        (
            EnvironmentConfig(classes={"mine": f"{FILE}:no_prompts"}, reward_function=f"{FILE}:gsm8k_strict"),
            "environment.classes.mine: no_prompts cannot be called with prompts, completions",
        ),
    ],
)
def test_what_cannot_be_called_is_refused_before_a_start(config: EnvironmentConfig, words: str | None) -> None:
    if words is None:
        registry.check(config)
        return
    with pytest.raises(UserError, match=r"environment\.(reward_function|options|classes)") as refused:
        registry.check(config)
    assert words in str(refused.value)


def test_columns_and_function_have_to_fit(tmp_path: Path) -> None:
    """A function in TRL's form gets every column."""
    rows = verl_rows(tmp_path / "rows.parquet", "any", None)
    missing = r"environment\.reward_function = .*:accuracy: .*missing a required argument: 'solution' \(.* columns of "
    with pytest.raises(UserError, match=missing + r"data\.train: .*rows\.parquet, .*; give the rows the column"):
        check_files([rows], config_of("accuracy"))
    with pytest.raises(UserError, match="unexpected keyword argument 'data_source'"):
        check_files([verl_rows(tmp_path / "answer.parquet", "any", None, answer="1")], config_of("only_answers"))
    plain = {"prompt": [{"role": "user", "content": "a question"}], "answer": "1", "env_class": ""}
    pq.write_table(pa.Table.from_pylist([plain]), tmp_path / "plain.parquet")
    assert check_files([tmp_path / "plain.parquet"], config_of("only_answers")) == 1


def test_a_row_with_a_name_is_not_judged_by_the_function(tmp_path: Path) -> None:
    config = config_of("gsm8k_strict")
    with pytest.raises(UserError, match="'guess' is unknown: ") as refused:
        check_files([verl_rows(tmp_path / "rows.parquet", "any", "1", env_class="guess")], config)
    assert "judges only rows without env_class: leave env_class out, or give" in str(refused.value)
    assert str(refused.value).endswith(f"environment.classes.guess={FILE}:gsm8k_strict")


def test_rows_and_function_have_to_fit(tmp_path: Path) -> None:
    config = config_of("gsm8k_strict")
    missing = verl_rows(tmp_path / "missing.parquet", "any", None)
    with pytest.raises(UserError, match=r"row 0, column reward_spec\.ground_truth: it is missing"):
        check_files([missing], config)
    assert check_files([missing], config_of("unique_letters")) == 1
    elsewhere = verl_rows(tmp_path / "elsewhere.parquet", "any", "1", env_class="gsm8k")
    with pytest.raises(UserError, match=r"environment\.reward_function.*no row uses it.*env_class is gsm8k"):
        registry.check_reward_function(config, environments_of([elsewhere], config))
    named = EnvironmentConfig(classes={"gsm8k": f"{FILE}:math_with_accuracy"})
    assert registry.make("gsm8k", {"reward_model": {"ground_truth": "1"}}, named).step("Answer: 1")["reward"] == 1.0
    both = EnvironmentConfig(default="gsm8k", reward_function=f"{FILE}:gsm8k_strict")
    assert [key for key, *_ in both.refusals()] == ["environment.default"]


def test_an_absolute_path_holds_in_another_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = registry.with_absolute_paths(config_of("gsm8k_strict"))
    monkeypatch.chdir(tmp_path)
    extras = {"reward_model": {"ground_truth": "1"}}
    assert registry.make("reward_function", extras, config).step("#### 1")["reward"] == 1.0


def test_coroutines_share_a_loop_and_end_with_their_callers(characters_chat: Renderer, tmp_path: Path) -> None:
    """Judges more answers at once than the function's module-global semaphore admits, one of them by `sys.exit`."""
    file = verl_rows(tmp_path / "train.parquet", "any", "1")
    answers = ["exit", *map(str, range(8))]
    ended, *played = judged(characters_chat, config_of("limited_judge"), file, answers)
    assert ended.status is Status.ERROR_ENV and "SystemExit(3)" in ended.metadata["error"]
    assert [t.reward for t in played] == list(range(8)), [t.metadata for t in played]
    begun, cancelled = threading.Event(), threading.Event()
    extras = {"reward_model": {"ground_truth": "1"}, "extra_info": {"begun": begun, "cancelled": cancelled}}
    call = Call(registry.make("reward_function", extras, config_of("limited_judge")).step, "never")
    thread = threading.Thread(target=call.run, daemon=True)
    thread.start()
    assert begun.wait(60) and call.give_up()
    thread.join(60)
    assert not thread.is_alive() and cancelled.wait(60)
