"""Tags: the same results as regular expressions, in linear time."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_mega.config.schema import EnvironmentConfig, RetrieverConfig
from skyrl_mega.envs import make
from skyrl_mega.envs.search.env import SearchEnv
from skyrl_mega.envs.tags import all_tags, first_boxed, first_tag
from skyrl_mega.envs.text2sql.reward import solution
from tests.support.machine import within

PIECES = ["<a>", "</a>", "<b>", "</b>", "<", ">", "/", "a", "x", "\n", "\\boxed{", "}", "<a", "a>"]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=14).map("".join)


@settings(max_examples=1500, deadline=None)
@given(TEXTS)
def test_as_the_regular_expressions(text: str) -> None:
    match = re.search(r"<(a|b)>(.*?)</\1>", text, re.DOTALL)
    tag = first_tag(text, "a", "b")
    assert (tag and (*tag,)) == (match and (match[1], match[2], match.start()))
    assert [tag.text for tag in all_tags(text, "a")] == re.findall(r"<a>(.*?)</a>", text, re.DOTALL)
    boxed = re.search(r"\\boxed\{([^}]+)\}", text)
    assert first_boxed(text) == (boxed and boxed[1])


MARKS = ["<think>", "</think>", "<THINK>", "<solution>", "</solution>", "<sql>", "</observation>", "x", " ", "\n"]


@settings(max_examples=1000, deadline=None)
@given(st.lists(st.lists(st.sampled_from(MARKS), max_size=8).map("".join), min_size=1, max_size=3))
def test_the_format_of_sql_as_it_was(turns: list[str]) -> None:
    assert solution(turns) == former(turns)


def former(turns: list[str]) -> str | None:
    """Returns the solution by the former implementation with regular expressions."""
    text = "<observation></observation>".join(turns)
    before, start, after = text.partition("<solution>")
    inner, end, rest = after.partition("</solution>")
    if not start or not end or "<solution>" in inner + rest or "</solution>" in rest:
        return None
    if re.search(r"</?(think|sql|observation)\b", inner, re.IGNORECASE):
        return None
    if not re.search(r"<think>.*?</think>", text, re.DOTALL):
        return None
    for mark in re.finditer(r"</observation>", before, re.IGNORECASE):
        if not before[mark.end() :].lstrip().lower().startswith("<think>"):
            return None
    return inner.strip()


def step(name: str, text: str, tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "t" / "repo").mkdir(parents=True, exist_ok=True)
    (tmp_path / "db").mkdir(exist_ok=True)
    (tmp_path / "db" / "db.sqlite").touch()
    options = {"text2sql": {"db_path": str(tmp_path)}, "swe": {"tasks": str(tmp_path)}}
    row = {"reward_spec": {"ground_truth": "1"}, "db_id": "db", "extra_info": {"task": "t"}}
    if name == "search":
        return dict(SearchEnv({"retriever": RetrieverConfig()}, {**row, "max_turns": 3}).step(text))
    return dict(make(name, row, EnvironmentConfig(options=options), max_turns=3).step(text))


@pytest.mark.parametrize(
    "name, piece",
    [
        ("search", "<search>"),
        ("search", "<answer><search>"),
        ("python", "<python>"),
        ("swe", "<bash>"),
        ("text2sql", "<sql>"),
        ("multiply", "\\boxed{"),
    ],
)
def test_a_policy_that_loops_holds_nobody_up(name: str, piece: str, tmp_path: Path) -> None:
    text = piece * (400_000 // len(piece))  # seconds to minutes with a regular expression
    start = time.process_time()
    assert not step(name, text, tmp_path)["done"]
    assert within(time.process_time() - start, 1)


def test_loops_around_a_solution() -> None:
    start = time.process_time()
    assert solution(["<think>" * 50_000 + "<solution>SELECT 1</solution>"]) is None
    assert solution(["<think></think>" + "</observation><think>" * 20_000 + "<solution>SELECT 1</solution>"])
    assert not list(all_tags("<action>" * 50_000, "action"))
    assert within(time.process_time() - start, 1)
