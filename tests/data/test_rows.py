"""Reading of rows: SkyRL's files unchanged, errors with file, row and column."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import EnvironmentConfig, RetrieverConfig
from skyrl_mega.data import check_files, load_demonstrations, load_prompts
from tests.support.machine import within

CONFIG = EnvironmentConfig()
USER = [{"role": "user", "content": "2 * 3"}]
GOOD: dict[str, Any] = {
    "data_source": "synthetic_multiply",
    "prompt": USER,
    "env_class": "multiply",
    "reward_spec": {"method": "rule", "ground_truth": "6"},
    "extra_info": {"num_digits": 1, "split": "train"},
}


def write(file: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), file)
    return file


def refused(file: Path, config: EnvironmentConfig = CONFIG) -> str:
    """Returns the one-line error message, equal for both readers of a file."""
    with pytest.raises(UserError) as checked:
        check_files([file], config)
    with pytest.raises(UserError) as loaded:
        load_prompts([file], config)
    assert str(checked.value) == str(loaded.value)
    assert "\n" not in str(checked.value) and str(file) in str(checked.value)
    return str(checked.value)


def test_a_row_becomes_a_prompt(tmp_path: Path) -> None:
    file = write(tmp_path / "a.parquet", [GOOD, {**GOOD, "extra_info": {"num_digits": 2, "split": "x"}}])
    first, second = load_prompts([file], CONFIG)
    assert (first.uid, second.uid, first.messages, first.env_class) == (0, 1, USER, "multiply")
    assert second.extras == {
        "data_source": "synthetic_multiply",
        "reward_spec": {"method": "rule", "ground_truth": "6"},
        "extra_info": {"num_digits": 2, "split": "x"},
    }
    assert check_files([file], CONFIG) == 2


def test_uids_run_over_files_and_a_limit_does_not_move_them(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{n}.parquet", [GOOD] * 3) for n in "abc"]
    assert [p.uid for p in load_prompts(files, CONFIG)] == list(range(9))
    assert [p.uid for p in load_prompts(files, CONFIG, limit=2)] == [0, 1, 3, 4, 6, 7]


@pytest.mark.parametrize("ground_truth", ["6", 6, ["6", "six"], {"target": ["6"]}])
def test_ground_truth_of_any_type(tmp_path: Path, ground_truth: Any) -> None:
    config = EnvironmentConfig(retriever=RetrieverConfig(url="http://localhost:1"))
    row = {**GOOD, "env_class": "search", "reward_spec": {"method": "rule", "ground_truth": ground_truth}}
    (prompt,) = load_prompts([write(tmp_path / "a.parquet", [row])], config)
    assert prompt.extras["reward_spec"]["ground_truth"] == ground_truth


def test_files_as_skyrl_writes_them(tmp_path: Path) -> None:
    """Reads keys present in some messages only, large strings, dictionary-encoded names and extra columns."""
    prompt = [{"role": "system", "content": "s", "name": None}, {"role": "user", "content": "q", "name": "Ann"}]
    table = pa.Table.from_pylist([{**GOOD, "prompt": prompt, "db_id": "farm"}, {**GOOD, "db_id": "zoo"}])
    table = table.set_column(2, "env_class", pa.array(["multiply", "gsm8k"]).dictionary_encode())
    struct = pa.large_list(pa.struct([(k, pa.large_string()) for k in ("role", "content", "name")]))
    table = table.set_column(1, "prompt", table["prompt"].combine_chunks().cast(struct))
    pq.write_table(table, tmp_path / "a.parquet")
    first, second = load_prompts([tmp_path / "a.parquet"], CONFIG)
    assert first.messages == [{"role": "system", "content": "s"}, {"role": "user", "content": "q", "name": "Ann"}]
    assert (first.extras["db_id"], second.env_class, second.messages) == ("farm", "gsm8k", USER)


def test_rows_without_an_environment_take_the_default(tmp_path: Path) -> None:
    without = {k: v for k, v in GOOD.items() if k != "env_class"}
    config = EnvironmentConfig(default="gsm8k")
    column_missing = write(tmp_path / "a.parquet", [without])
    some_empty = write(tmp_path / "b.parquet", [GOOD, {**GOOD, "env_class": None}, {**GOOD, "env_class": ""}])
    names = [p.env_class for p in load_prompts([column_missing, some_empty], config)]
    assert names == ["gsm8k", "multiply", "gsm8k", "gsm8k"]
    assert "row 0, column env_class" in refused(column_missing)
    assert "row 1, column env_class: it is empty" in refused(some_empty)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"prompt": None}, "row 2, column prompt: it is empty"),
        ({"prompt": []}, "row 2, column prompt: it is empty"),
        ({"prompt": [*USER, {"role": "usr", "content": "x"}]}, "row 2, column prompt: role is 'usr'; allowed: system,"),
        ({"prompt": [{"role": None, "content": "x"}]}, "row 2, column prompt: role is None"),
        ({"prompt": [*USER, {"role": "user", "content": None}]}, "row 2, column prompt: content is None"),
        (
            {"env_class": "multipy"},
            "row 2, column env_class: environment 'multipy' is unknown: did you mean 'multiply'",
        ),
        ({"reward_spec": None}, "row 2, column reward_spec.ground_truth: it is missing"),
        ({"reward_spec": {"method": "rule", "ground_truth": None}}, "row 2, column reward_spec.ground_truth"),
    ],
)
def test_a_bad_row_is_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    assert said in refused(write(tmp_path / "a.parquet", [GOOD, GOOD, {**GOOD, **change}, GOOD]))


def test_the_row_is_right_beyond_the_first_batch(tmp_path: Path) -> None:
    rows = [GOOD] * 70_000 + [{**GOOD, "prompt": [*USER, {"role": "user", "content": None}]}]
    assert "row 70000, column prompt" in refused(write(tmp_path / "a.parquet", rows))


@pytest.mark.parametrize("prompt", ["2 * 3", ["2 * 3"], [{"role": "user"}], [{"role": "user", "content": [1]}]])
def test_a_prompt_of_another_type_is_refused(tmp_path: Path, prompt: Any) -> None:
    message = refused(write(tmp_path / "a.parquet", [{**GOOD, "prompt": prompt}]))
    assert "column prompt: its type is" in message and "allowed: list<struct<role: string, content: string>>" in message


def test_files_that_are_no_data(tmp_path: Path) -> None:
    without = write(tmp_path / "a.parquet", [{"question": "q", "env_class": "gsm8k"}])
    assert "has no column prompt (it has question, env_class)" in refused(without)
    assert "does not exist" in refused(tmp_path / "absent.parquet")
    text = tmp_path / "text.parquet"
    text.write_text("not parquet at all, but long enough to hold a footer", encoding="utf-8")
    assert "cannot be read as parquet" in refused(text)
    whole = write(tmp_path / "whole.parquet", [GOOD] * 100).read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    assert "cannot be read as parquet" in refused(tmp_path / "cut.parquet")
    pq.write_table(pa.Table.from_pylist([GOOD]).slice(0, 0), tmp_path / "empty.parquet")
    assert "has no rows" in refused(tmp_path / "empty.parquet")


def test_an_environment_may_need_no_ground_truth(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from skyrl_mega.envs import BaseTextEnv\n"
        "class Free(BaseTextEnv):\n    requires_ground_truth = False\n    def step(self, action): ...\n",
        encoding="utf-8",
    )
    config = EnvironmentConfig(classes={"free": f"{tmp_path / 'mine.py'}:Free"})
    file = write(tmp_path / "a.parquet", [{"prompt": USER, "env_class": "free"}])
    assert load_prompts([file], config)[0].extras == {}


def test_demonstrations(tmp_path: Path) -> None:
    shown = {**GOOD, "extra_info": {"demonstration": "6"}}
    (one,) = load_demonstrations([write(tmp_path / "a.parquet", [shown])])
    assert (one.messages, one.turns) == (USER, [{"role": "assistant", "content": "6"}])
    for extra_info in ({"demonstration": None}, {"demonstration": ""}, None):
        file = write(tmp_path / "b.parquet", [shown, {**GOOD, "extra_info": extra_info}])
        with pytest.raises(UserError, match=r"warmup.files: .*row 1, column extra_info.demonstration"):
            load_demonstrations([file])
    with pytest.raises(UserError, match=r"row 0, column extra_info\.demonstration"):
        load_demonstrations([write(tmp_path / "c.parquet", [GOOD])])


SAID = {"role": "assistant", "content": "6"}
TOLD = {"role": "user", "content": "Wrong."}


def test_demonstrations_of_several_turns(tmp_path: Path) -> None:
    shown = [[SAID, TOLD, SAID], [SAID], [SAID, TOLD, {**TOLD, "name": "Ann"}, SAID]]
    rows = [{**GOOD, "extra_info": {"demonstration": turns}} for turns in shown]
    assert [d.turns for d in load_demonstrations([write(tmp_path / "a.parquet", rows)])] == shown


@pytest.mark.parametrize(
    "turns, said",
    [
        (None, "it is empty; allowed: list<struct"),
        ([], "it is empty"),
        ([TOLD, SAID], "allowed: an assistant's message, then"),
        ([SAID, TOLD], "and an assistant's at the end"),
        ([SAID, {**TOLD, "role": "usr"}, SAID], "role is 'usr'; allowed: system,"),
        ([SAID, {**TOLD, "content": None}, SAID], "content is None"),
    ],
)
def test_a_demonstration_that_is_no_conversation(tmp_path: Path, turns: Any, said: str) -> None:
    rows = [{**GOOD, "extra_info": {"demonstration": t}} for t in ([SAID, TOLD, SAID], turns)]
    with pytest.raises(UserError, match=r"row 1, column extra_info\.demonstration: ") as caught:
        load_demonstrations([write(tmp_path / "a.parquet", rows)])
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_100k_rows_are_checked_in_little_time(tmp_path: Path) -> None:
    """Judges each row by its environment: about 10 µs a row."""
    file = write(tmp_path / "a.parquet", [GOOD] * 100_000)
    started = time.process_time()
    assert check_files([file], CONFIG) == 100_000
    assert within(time.process_time() - started, 3)


def test_what_an_environment_of_ones_own_may_be_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "writes_first.py").write_text(
        "from skyrl_mega.envs.base import BaseTextEnv\n\n\nclass Own(BaseTextEnv):\n"
        "    def init(self, prompt):\n        return [{'role': 'user', 'content': 'go'}], {}\n\n"
        "    def step(self, action):\n        raise NotImplementedError\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    config = EnvironmentConfig(classes={"own": "writes_first:Own"})
    row = {"prompt": [{"role": "user", "content": ""}], "env_class": "own", "reward_spec": {"ground_truth": ""}}
    assert check_files([write(tmp_path / "a.parquet", [row])], config) == 1
    infinite = {**GOOD, "env_class": "math", "reward_spec": {"ground_truth": "infinity"}}
    assert check_files([write(tmp_path / "b.parquet", [infinite])], config) == 1
    assert "are blank" in refused(write(tmp_path / "c.parquet", [{**row, "env_class": "multiply"}]), config)
    empty = {**GOOD, "reward_spec": {"ground_truth": ""}}
    assert "it is empty" in refused(write(tmp_path / "d.parquet", [empty]), config)
