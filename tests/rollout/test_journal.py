"""The journal of recorded answers: an answer is used again, unless the tokens before differ."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from skyrl_mega.common.errors import UserError
from skyrl_mega.engines.base import Completion, Request, Sampling
from skyrl_mega.rollout import journal
from skyrl_mega.rollout.journal import Journal, RecordedTurn, digest
from skyrl_mega.rollout.routing.router import Router
from tests.support.virtual_rollouts import Engines


def completion(name: str, tokens: list[int], finish: str = "stop") -> Completion:
    return Completion(name, array("i", tokens), array("f", [-0.5] * len(tokens)), finish, ((3, 0),))


def test_an_answer_is_known_where_all_tokens_before_it_are_the_same() -> None:
    known = Journal()
    known.keep(Request("0/1/0/7/0", [1, 2, 3], 9, seed=0), completion("0/1/0/7/0", [4]))
    assert known.answer(Request("0/1/0/7/0", array("i", [1, 2, 3]), 9, seed=0)) == completion("0/1/0/7/0", [4])
    assert known.answer(Request("0/1/0/7/0", [1, 2, 4], 9, seed=0)) is None
    assert known.answer(Request("0/1/0/7/1", [1, 2, 3], 9, seed=0)) is None
    assert known.answer(Request("0/1/0/7/0", [1, 2, 3], 8, seed=0)) is None, "it may have less room now"
    known.forget("0/1/0/7")
    assert known.answer(Request("0/1/0/7/0", [1, 2, 3], 9, seed=0)) is None and known.all() == []


def test_an_answer_whose_time_was_over_is_asked_for_again() -> None:
    known = Journal()
    known.keep(Request("a/0", [1], 9, seed=0), completion("a/0", [], "timeout"))
    assert known.all() == []


turn = st.builds(
    lambda name, context, tokens, logprobs, finish, versions: RecordedTurn(
        name,
        digest(Request(name, context, 9, seed=0)),
        Completion(
            name, array("i", tokens), array("f", [*logprobs, *[0.0] * len(tokens)][: len(tokens)]), finish, versions
        ),
    ),
    st.text(st.characters(blacklist_categories=["Cs"]), max_size=5).map(lambda text: f"{text}/0"),
    st.lists(st.integers(0, 2**31 - 1), max_size=5),
    st.lists(st.integers(0, 2**31 - 1), max_size=8),
    st.lists(st.floats(-50, 0, width=32), max_size=8),
    st.sampled_from(["stop", "length"]),
    st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 2**20)), max_size=3).map(tuple),
)


@given(st.lists(turn, max_size=6))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_a_file_has_all_of_it(tmp_path: Path, said: list[RecordedTurn]) -> None:
    journal.write(tmp_path / "turns.parquet", said)
    assert journal.read(tmp_path / "turns.parquet") == said


def test_routes_come_back_with_the_turns_that_they_are_of(tmp_path: Path) -> None:
    """Writes and reads turns with routes; a turn requested with the routes of other tokens is generated again."""
    request, known = Request("a/0", [1, 2, 3], 9, seed=0, routes_from=1), Journal()
    routes = np.arange(4 * 2 * 2, dtype=np.uint16).reshape(4, 2, 2)
    known.keep(request, replace(completion("a/0", [4, 5, 6], "stop"), routes=routes))
    known.keep(Request("b/0", [7], 9, seed=0), completion("b/0", [8], "stop"))
    journal.write(tmp_path / "turns.parquet", known.all())
    assert [file.name for file in tmp_path.iterdir()] == ["turns.parquet"]
    columns = pq.ParquetFile(tmp_path / "turns.parquet").metadata.row_group(0)
    kinds = {c.path_in_schema: c.compression for c in map(columns.column, range(columns.num_columns))}
    assert kinds.pop("routes") == "UNCOMPRESSED" and set(kinds.values()) == {"SNAPPY"}, "no two routes are alike"
    back = Journal()
    back.add(journal.read(tmp_path / "turns.parquet"))
    answer = back.answer(request)
    assert answer is not None and answer.routes is not None and answer.routes.dtype == np.uint16
    np.testing.assert_array_equal(answer.routes, routes)
    assert back.answer(replace(request, routes_from=0)) is None
    plain = back.answer(Request("b/0", [7], 9, seed=0))
    assert plain is not None and plain.routes is None


@pytest.mark.parametrize(
    "columns",
    [
        None,
        {"tokens": [[1, 2]], "logprobs": [[-1.0]]},
        {"tokens": [None], "logprobs": [[-1.0]]},
        {"tokens": [[1]], "logprobs": [[-1.0]], "versions": [None]},
        {"tokens": [["a"]], "logprobs": [[-1.0]]},
    ],
    ids=["no parquet", "fewer log-probs", "no tokens", "no versions", "words"],
)
def test_a_file_of_something_else_is_one_line(tmp_path: Path, columns: dict[str, Any] | None) -> None:
    file = tmp_path / "turns-driver.parquet"
    if columns is None:
        file.write_bytes(b"PAR1 and no more")
    else:
        spans = [[{"version": 0, "start": 0}]]
        pq.write_table(
            pa.table({"request": ["a/0"], "asked": [b"0"], "finish": ["stop"], "versions": spans} | columns), file
        )
    with pytest.raises(
        UserError, match=r"turns-driver.parquet: it cannot be read as recorded turns .*; take another checkpoint"
    ) as found:
        journal.read_all(tmp_path)
    assert "\n" not in str(found.value)


def test_a_workers_turns_have_the_names_that_all_processes_give() -> None:
    """Removes the worker's mark from request ids in the journal."""
    sent: list[str] = []

    class Told(Router):
        async def _answer(self, request: Request) -> Completion:
            sent.append(request.id)
            return completion(request.id, [5])

    async def said() -> list[RecordedTurn]:
        engines: Any = Engines(1, Random(0))
        router = Told(engines, Sampling(), 4, 10.0, service=True, mark="@mark")
        for _ in range(2):
            await router.generate(Request("0/1/0/7/0", [1], 9, seed=0))
        return router.journal.all()

    (one,) = asyncio.run(said())
    assert (one.request, one.trajectory) == ("0/1/0/7/0", "0/1/0/7")
    assert sent == ["0/1/0/7/0@mark"]
