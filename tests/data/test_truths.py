"""Rows with unreachable rewards: counted, reported, and an error if too many."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import EnvironmentConfig
from skyrl_mega.data import check_files, load_prompts
from skyrl_mega.envs import registry
from skyrl_mega.envs.math import env
from skyrl_mega.envs.search.score import exact_match, targets_of

CONFIG = EnvironmentConfig()


def write(file: Path, name: str, truths: Sequence[Any], **columns: Sequence[Any]) -> Path:
    """Writes a file of one environment's rows."""
    prompts = [[{"role": "user", "content": "q"}]] * len(truths)
    specs = pa.array([{"ground_truth": truth} for truth in truths])
    table = {"prompt": prompts, "env_class": [name] * len(truths), "reward_spec": specs, **columns}
    pq.write_table(pa.table(table), file)
    return file


def refusal(file: Path, config: EnvironmentConfig = CONFIG) -> str:
    with pytest.raises(UserError) as caught:
        check_files([file], config)
    return str(caught.value)


def says(name: str, truth: Any, options: dict[str, Any] | None = None, **row: Any) -> str | None:
    """Returns an environment's message about a row."""
    check = registry.row_check(name, EnvironmentConfig(options={name: options} if options else {}))
    assert check is not None
    return check({"reward_spec": {"ground_truth": truth}, **row})


@pytest.mark.parametrize(
    "name, truth",
    [
        ("gsm8k", 18.0),
        ("gsm8k", "18.0"),
        ("gsm8k", "eighteen"),
        ("gsm8k", "1/2"),
        ("gsm8k", ["18"]),
        ("gsm8k_multi_turn", 18.0),
        ("gsm8k_multi_turn", {"target": "18"}),
        ("addition", 58.0),
        ("addition", " 58"),
        ("addition", ["58"]),
        ("calculator", 18.0),
        ("calculator", "1" * 201),
        ("multiply", 6.0),
        ("multiply", ["6"]),
        ("multiply", "{6}"),
        ("math", ["1", "2"]),
        ("math", {"target": ["1"]}),
        ("math", '{"target": ["1"]}'),
        ("math", "1 + " * 200),
        ("aime", ["1", "2"]),
        ("aime", {"answer": "1"}),
        ("python", ["1"]),
        ("python", "1</answer>"),
        ("search", {"target": []}),
        ("search", []),
        ("search", {"answers": ["Paris"]}),
        ("search", ["", None]),
        ("search", ["7.0"]),
        ("search", [None]),
        ("search", [["Paris"]]),
        ("search", '{"target": ["Paris"]}'),
        ("search", 1945.0),
        ("lcb", "[]"),
        ("lcb", []),
        ("lcb", '{"input": "1"}'),
        ("lcb", '[{"input": "1"}]'),
        ("lcb", "no JSON"),
    ],
)
def test_a_ground_truth_that_no_answer_matches(name: str, truth: Any) -> None:
    why = says(name, truth)
    assert why is not None and "column reward_spec.ground_truth" in why and "allowed" in why and "\n" not in why


@pytest.mark.parametrize(
    "name, truth",
    [
        *(("gsm8k", truth) for truth in ("18", 18, "1,234", "$1,234", "-5", "-$5", "2.5", 2.5)),
        ("addition", "85"),
        ("calculator", -7),
        ("multiply", " 6 "),
        *(("math", truth) for truth in (18.0, "18", r"\frac{1}{2}", "x = 1,\n 2", r"\{1, 2\}", "[1, 2)", r"\boxed{3}")),
        ("aime", "204"),
        ("python", "(1, 2)"),
        *(("search", truth) for truth in ("Paris", ["Paris", "Lutetia"], {"target": ["1945", 1945]}, "!!!", 1945)),
        *(("search", truth) for truth in (["", "Paris"], {"target": ["7.0", "magnitude 7"]}, [None, "Paris"])),
        ("lcb", json.dumps([{"input": "1", "output": "2", "testtype": "stdin"}])),
    ],
)
def test_a_ground_truth_that_can_be_matched(name: str, truth: Any) -> None:
    assert says(name, truth) is None


def test_options_decide_what_math_can_match() -> None:
    long = "1" + " + 1" * 100
    assert says("math", long) is not None and says("math", long, {"tail": 0}) is None
    assert says("math", 34.0, {"answer": "dapo"}) is not None and says("math", 34, {"answer": "dapo"}) is None


def test_math_asks_once_for_rows_that_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(env.minerva, "same", lambda gold, answer: not asked.append(gold))
    assert [says("math", "987123", {"answer": "dapo"}) for _ in range(3)] == [None] * 3 and asked == ["987123"]


def test_an_empty_target_of_search_pays_nothing() -> None:
    for truth in (["", "Paris"], [None, "Paris"], {"target": [" ", None]}):
        assert exact_match("", targets_of(truth)) == exact_match("none", targets_of(truth)) == 0.0
    assert exact_match("paris", targets_of(["", "Paris"])) == 1.0


def test_software_tasks(tmp_path: Path) -> None:
    (tmp_path / "cart" / "repo").mkdir(parents=True)
    options = {"tasks": str(tmp_path)}
    assert says("swe", "make test", options, extra_info={"task": "cart"}) is None
    for truth, info in (
        ([], {"task": "cart"}),
        (" ", {"task": "cart"}),
        ("make test", {"task": "card"}),
        ("make test", {"task": "../cart"}),
        ("make test", {"task": "cart", "FAIL_TO_PASS": "test_a"}),
        ("make test", '{"task": "cart"}'),
        ("make test", None),
    ):
        assert says("swe", truth, options, extra_info=info) is not None, (truth, info)


def test_queries_are_compiled_by_their_databases(tmp_path: Path) -> None:
    (tmp_path / "farm").mkdir()
    with sqlite3.connect(tmp_path / "farm" / "farm.sqlite") as connection:
        connection.execute("CREATE TABLE cow (name TEXT)")
    connection.close()
    options, database = {"db_path": str(tmp_path)}, tmp_path / "farm" / "farm.sqlite"
    assert says("text2sql", "-- all\nSELECT name FROM cow;", options, db_id="farm") is None
    for truth, db_id, why in (
        ("SELECT nam FROM cow", "farm", "no such column"),
        ("SELEC name FROM cow", "farm", "syntax error"),
        ("SELECT name FROM cows", "farm", "no such table"),
        ("DELETE FROM cow", "farm", "not authorized"),
        (["SELECT name FROM cow"], "farm", "allowed is a query"),
        ("SELECT name FROM cow", "zoo", "has no zoo/zoo.sqlite"),
        ("SELECT name FROM cow", None, "column db_id"),
    ):
        assert why in (says("text2sql", truth, options, db_id=db_id) or ""), (truth, db_id)
    database.with_name("farm.sqlite-wal").write_bytes(b"changes")
    assert "merge them" in (says("text2sql", "SELECT name FROM cow", options, db_id="farm") or "")


def test_a_seed_of_gymnasium() -> None:
    assert says("gym", None, extra_info={"seed": 3}) is None and says("gym", None) is None
    for info in ({"seed": "three"}, {"seed": 0.5}, {"seed": float("nan")}, {"seed": float("inf")}, '{"seed": 3}'):
        assert "column extra_info.seed" in (says("gym", None, extra_info=info) or "")


def test_few_wrong_rows_are_told_and_more_refused(tmp_path: Path) -> None:
    few = write(tmp_path / "few.parquet", "gsm8k", ["1"] * 30 + ["18.0"] + ["1"] * 19)
    messages: list[str] = []
    assert check_files([few], CONFIG, say=messages.append) == 50
    assert messages[0].startswith("data.train: no answer can earn the reward of 1 of 50 rows (2 %); the first: ")
    assert f"{few}, row 30, column reward_spec.ground_truth = 18.0: answers are compared as text" in messages[
        0
    ].replace("'", "")
    many = write(tmp_path / "many.parquet", "gsm8k", ["1"] * 18 + ["18.0", "x"])
    line = refusal(many)
    assert "2 of 20 rows (10 %)" in line and f"{many}, row 18" in line and "at most 5%" in line
    with pytest.raises(UserError, match="2 of 20 rows"):
        load_prompts([many], CONFIG)
    assert "2 of 2 rows (100 %)" in refusal(write(tmp_path / "all.parquet", "gsm8k", ["18.0", "x"]))
    check_files([few, many], CONFIG, say=messages.append)  # over all files of a setting: 3 of 70
    assert "3 of 70 rows" in messages[1] and "few.parquet, row 30" in messages[1]


def test_a_reward_spec_of_json_text_is_read(tmp_path: Path) -> None:
    file = write(tmp_path / "t.parquet", "gsm8k", [None, None], data_source=["a", "a"])
    table = pq.read_table(file)
    at = table.column_names.index("reward_spec")
    for column in ("reward_spec", "reward_model"):
        text = [json.dumps({"method": "rule", "ground_truth": n}) for n in ("1", "2")]
        pq.write_table(table.set_column(at, column, pa.array(text)), file)
        assert [p.extras[column]["ground_truth"] for p in load_prompts([file], CONFIG)] == ["1", "2"]
        pq.write_table(table.set_column(at, column, pa.array([text[0], '{"ground_truth": "18.0"}'])), file)
        assert f"row 1, column {column}.ground_truth" in refusal(file)
    for spec, why in (
        ("1", "column reward_spec: it is a int"),
        ("one", "column reward_spec: it is text, but not JSON"),
        ("[1]", "column reward_spec: it is a list"),
        ('{"method": "rule"}', "column reward_spec.ground_truth: it is missing"),
        ("", "column reward_spec.ground_truth: it is missing"),
    ):
        pq.write_table(table.set_column(at, "reward_spec", pa.array([text[0], spec])), file)
        assert f"row 1, {why}" in refusal(file), spec
    pq.write_table(table.set_column(at, "reward_spec", pa.array([[1], [2]])), file)
    assert "row 0, column reward_spec: it is a list; allowed is a struct with ground_truth" in refusal(file)


@pytest.mark.parametrize("other", ["a-reward-model", 0.7])
def test_the_column_that_does_not_judge_may_be_anything(tmp_path: Path, other: Any) -> None:
    file = write(tmp_path / "t.parquet", "gsm8k", ["1"], reward_model=pa.array([other]))
    assert load_prompts([file], CONFIG)[0].extras["reward_model"] == other


def test_the_column_with_a_ground_truth_is_the_one_that_judges(tmp_path: Path) -> None:
    file = write(tmp_path / "t.parquet", "gsm8k", ["1"], reward_model=pa.array([{"ground_truth": "2"}]))
    table = pq.read_table(file)
    nothing = pa.array(
        [{"method": "rule", "ground_truth": None}], pa.struct([("method", pa.string()), ("ground_truth", pa.string())])
    )
    pq.write_table(table.set_column(table.column_names.index("reward_spec"), "reward_spec", nothing), file)
    prompt = load_prompts([file], CONFIG)[0]
    assert registry.make("gsm8k", prompt.extras, CONFIG, 1).step("#### 2")["reward"] == 1.0
