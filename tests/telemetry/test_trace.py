"""Traces for Perfetto."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_mega.telemetry.trace import Span, TraceWriter, lanes, named, wall_clock, write_part
from tests.telemetry.trace_format import properly_nested, tracks, within

TIMES = st.integers(0, 40).map(float)
SPANS = st.lists(st.tuples(TIMES, TIMES).map(lambda pair: Span("x", min(pair), max(pair))), max_size=30)


@given(SPANS)
def test_spans_in_one_line_do_not_overlap_and_there_is_no_line_too_many(spans: list[Span]) -> None:
    placed = list(lanes(spans))
    assert sorted(span.start for _, span in placed) == sorted(span.start for span in spans)
    for i, (lane, one) in enumerate(placed):
        for other_lane, other in placed[:i]:
            assert lane != other_lane or other.end <= one.start or one.end <= other.start
    most = max((sum(s.start <= at.start < s.end for s in spans) for at in spans), default=0)
    lines = {lane for lane, span in placed if span.end > span.start}
    empty = sum(span.end == span.start for span in spans)
    assert len(lines) <= most + empty


def test_parts_and_spans_are_one_file(tmp_path: Path) -> None:
    part = tmp_path / "part.gz"
    one = {"ph": "X", "name": "mm", "pid": 7, "tid": 3, "ts": 5.0, "dur": 1.0}
    write_part(part, [*named(7, "policy-0"), one])
    file = tmp_path / "deep" / "trace.json.gz"
    with TraceWriter(file, zero=100.0) as trace:
        step = Span("step 1", 100.0, 110.0, {"metrics": {"policy/loss": float("1.5")}})
        trace.process(
            1, "driver", [step, Span("train", 101.0, 102.5), Span("sync", 103.0, 104.0)], "phases", nested=True
        )
        trace.process(2, "environments", [Span("a", 101.0, 103.0), Span("b", 102.0, 104.0)], "environment")
        trace.append(part)
        assert not file.exists(), "half a trace is none"
    spans_by_track = tracks(file)
    assert sorted(spans_by_track) == ["driver", "environments", "policy-0"]
    assert [(s["ts"], s["dur"], s["tid"]) for s in spans_by_track["driver"]] == [
        (0, 1e7, 0),
        (1e6, 1.5e6, 0),
        (3e6, 1e6, 0),
    ]
    assert {s["tid"] for s in spans_by_track["environments"]} == {0, 1}
    assert all(properly_nested(spans) for spans in spans_by_track.values())
    assert within(spans_by_track["driver"], spans_by_track["driver"][0]) and spans_by_track["driver"][0]["args"][
        "metrics"
    ] == {"policy/loss": 1.5}
    assert spans_by_track["policy-0"][0]["name"] == "mm"


def test_a_trace_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyError), TraceWriter(tmp_path / "t.json.gz", 0.0):
        raise KeyError("x")
    assert list(tmp_path.iterdir()) == []


def test_a_clock_that_only_runs_is_told_as_the_days() -> None:
    before = time.time()
    now, earlier = wall_clock(time.perf_counter()), wall_clock(time.perf_counter() - 3.0)
    after = time.time()
    assert before - 0.05 < now < after + 0.05 and before - 3.05 < earlier < after - 2.95
