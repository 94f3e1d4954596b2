"""Reading of trajectories: search, filters, sorting and parts."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_mega.common.errors import UserError
from skyrl_mega.evaluate.results import SCHEMA, row_of
from skyrl_mega.report import records, rows
from skyrl_mega.report.browse import page
from skyrl_mega.report.records import Query, Tokens
from skyrl_mega.trajectories import parquet
from skyrl_mega.trajectories.trajectory import Status
from tests.report.cases import double, run_folder, single, steps_of_double, with_steps

FAILURE = {"error": "environment m: step raised NameError('re')", "at": "m.py, line 9, in step: re.x"}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return run_folder(
        tmp_path / "mine",
        {
            1: [single(uid=1, reward=0.0, text="five"), single(uid=1, sample=1, text="SIX")],
            12: [double(), single(uid=2, reward=-1.0, status=Status.ERROR_ENV, metadata=FAILURE)],
        },
    )


def found(path: Path, **query: object) -> list[tuple[int | None, int, int]]:
    files = records.files_of([path])
    return [(r.step, r.uid, r.sample) for r in records.load(files, Query(**query))]  # type: ignore[arg-type]


def test_a_run_a_folder_and_a_file(run: Path) -> None:
    everything = [(1, 1, 0), (1, 1, 1), (12, 8, 1), (12, 2, 0)]
    assert found(run) == found(run / "trajectories") == everything
    assert found(run / "trajectories" / "step_000012.parquet") == everything[2:]
    both = records.files_of([run, run / "trajectories" / "step_000012.parquet"])
    assert {name for name, _ in both} == {"mine"} and len(both) == 2, "nothing is shown twice"


@pytest.mark.parametrize(
    "query, uids",
    [
        (dict(steps=(1, 1)), [1, 1]),
        (dict(steps=(2, 20)), [8, 2]),
        (dict(reward=(0.0, 0.5)), [1, 8]),
        (dict(reward=(-1.0, -1.0)), [2]),
        (dict(statuses=frozenset({"truncated_turns", "error_env"})), [8, 2]),
        (dict(text="six"), [1]),
        (dict(text="FOUND nothing"), [8]),
        (dict(text="why"), [8]),
        (dict(text="six", reward=(-1.0, 0.0)), []),
        (dict(error="NAMEERROR"), [2]),
        (dict(error="line 9"), [2]),
        (dict(error="timeout"), []),
        (dict(error="nameerror", steps=(1, 1)), []),
    ],
)
def test_filters(run: Path, query: dict[str, object], uids: list[int]) -> None:
    assert [uid for _, uid, _ in found(run, **query)] == uids


def test_an_error_of_the_policy_is_no_error_of_a_trajectory(tmp_path: Path) -> None:
    queries = [
        single(metadata={"error": "no such column: x"}),
        single(metadata={"close_error": "close raised OSError"}),
    ]
    run = run_folder(tmp_path / "r", {1: queries})
    assert [r.error for r in records.load(records.files_of([run]), Query())] == ["", "close: close raised OSError"]


def test_words_for_statuses() -> None:
    assert {"truncated_tokens", "truncated_turns"} <= records.statuses(["truncated"])
    assert records.statuses(["error_env", "completed"]) == {"error_env", "error_env_timeout", "completed"}
    assert records.statuses([]) == frozenset()
    with pytest.raises(UserError, match="--status lost: allowed: completed, "):
        records.statuses(["lost"])


def test_parts_of_a_file_without_steps(run: Path) -> None:
    [record] = records.load(records.files_of([run]), Query(text="found nothing"))
    shape = [(part.kind, [m["content"] for m in part.messages]) for part in record.parts]
    assert shape == [
        ("prompt", ["example question", "example answer", "the question"]),
        ("response", ["<search>first</search>"]),
        ("observation", ["found nothing"]),
        ("response", ["second"]),
    ]


@pytest.mark.parametrize("turns, kinds", [(0, ["prompt"]), (1, ["prompt", "response"])])
def test_parts_without_turns_or_without_observations(tmp_path: Path, turns: int, kinds: list[str]) -> None:
    messages = single().messages[: 1 + turns]
    run = run_folder(tmp_path / "r", {1: [single(turns=turns, messages=messages)]})
    [record] = records.load(records.files_of([run]), Query())
    assert [part.kind for part in record.parts] == kinds


def test_parts_of_a_file_with_steps(run: Path) -> None:
    file = run / "trajectories" / "step_000012.parquet"
    with_steps(file, [steps_of_double(), []])
    record, other = records.load(records.files_of([file]), Query())
    assert [(part.kind, part.start, part.end, len(part.messages)) for part in record.parts] == [
        ("prompt", 0, 4, 3),
        ("response", 4, 7, 1),
        ("observation", 7, 9, 1),
        ("response", 9, 12, 1),
    ]
    first = record.parts[1]
    assert (first.reward, first.generate_s, first.finish) == (0.25, 40.0, "stop")
    assert first.tool_calls == ({"name": "search", "arguments": {"query": "ü"}}, "plain words")
    assert [part.kind for part in other.parts] == ["prompt", "response"], "a row without steps is read as before"


def test_tokens_belong_to_their_trajectories_in_any_order(tmp_path: Path) -> None:
    many = {s: [single(uid=s, sample=i, tokens=[5, 9, s, i]) for i in range(5)] for s in (1, 2, 3)}
    run = run_folder(tmp_path / "r", many)
    loaded = records.load(records.files_of([run]), Query())
    for chosen in (loaded, loaded[::-1], loaded[1::2], sorted(loaded, key=lambda r: r.sample)):
        for record, tokens in zip(chosen, records.tokens_of(chosen), strict=True):
            assert tokens.ids.tolist() == [5, 9, record.uid, record.sample]
            assert tokens.mask.tolist() == [0, 0, 1, 1]
            assert np.allclose(tokens.logprobs, [0.0, 0.0, -0.25, -1.5])


@given(st.lists(st.integers(0, 1), max_size=30))
def test_spans_are_the_runs_of_the_mask(mask: list[int]) -> None:
    spans = Tokens(np.zeros(len(mask)), np.array(mask, np.int8), np.zeros(len(mask))).spans
    brute, at = [], 0
    for value, group in itertools.groupby(mask):
        length = len(list(group))
        if value:
            brute.append((at, at + length))
        at += length
    assert spans == brute


def test_empty_steps_are_no_fault(tmp_path: Path) -> None:
    assert found(run_folder(tmp_path / "r", {1: []})) == []


@pytest.mark.parametrize("content", [None, b"", b"PAR1 is how a parquet file begins"])
def test_another_file_is_refused(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "t.parquet"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError, match=r"t\.parquet: .*allowed: a.* trajectories/") as caught:
        found(file)
    assert "\n" not in str(caught.value)


def test_parquet_of_something_else_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"uid": [1]}), tmp_path / "t.parquet")
    with pytest.raises(UserError, match=r"trajectories/, or .* samples \(it has no column sample\)"):
        found(tmp_path / "t.parquet")


def test_wrong_places_and_steps(tmp_path: Path, run: Path) -> None:
    with pytest.raises(UserError, match="no such file or folder; allowed: a run's folder"):
        found(tmp_path / "nothing")
    with pytest.raises(UserError, match=r"no trajectories/\*\.parquet there"):
        found(tmp_path)
    with pytest.raises(UserError, match="--step: no file of that step; there are steps 1 to 12"):
        found(run, steps=(13, 13))


def test_the_present_store_has_what_is_needed() -> None:
    assert set(rows.NEEDED) <= set(parquet.SCHEMA.names)


def test_sorting(run: Path) -> None:
    loaded = records.load(records.files_of([run]), Query())
    by = {key: [r.uid for r in sorted(loaded, key=sort)] for key, sort in records.SORTS.items()}
    assert by["step"] == [1, 1, 8, 2]
    assert by["reward"] == [2, 1, 8, 1]
    assert by["tokens"][-1] == by["turns"][-1] == by["seconds"][-1] == 8
    assert by["prompt"] == [1, 1, 2, 8]
    unknown = [replace(r, step=None) for r in loaded]
    assert [r.uid for r in sorted(unknown, key=records.SORTS["step"])] == [1, 8, 1, 2], "by row where no step is known"


def test_an_evaluations_samples_are_trajectories_without_tokens(tmp_path: Path) -> None:
    """Reads several sets in a folder; a set's name may end in a number."""
    for name in ("guess", "aime24"):
        rows = [row_of(single(uid=uid, text=f"{name} {uid}"), ()) for uid in (3, 4)]
        pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), tmp_path / f"{name}.parquet")
    (tmp_path / "evaluation.json").write_text("{}")
    loaded = records.load(records.files_of([tmp_path]), Query())
    assert [(r.run, r.step, r.uid, r.response_length, r.prompt_length, r.weights) for r in loaded] == [
        ("aime24", None, 3, 2, 2, "–"), ("aime24", None, 4, 2, 2, "–"),
        ("guess", None, 3, 2, 2, "–"), ("guess", None, 4, 2, 2, "–"),
    ]  # fmt: skip
    assert [part.kind for part in loaded[0].parts] == ["prompt", "response"]
    assert [len(t.ids) for t in records.tokens_of(loaded)] == [0] * 4
    html = page(loaded)
    assert "aime24, guess · trajectories" in html
