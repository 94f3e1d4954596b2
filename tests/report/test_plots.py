"""Plots of given values."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_mega.report import plots
from skyrl_mega.report.plots import HEIGHT, LEFT, RIGHT, TOP, WIDTH, Series


def elements(svg: str, tag: str) -> list[dict[str, str]]:
    return [dict(node.attrib) for node in ElementTree.fromstring(svg).iter(tag)]


def points(svg: str) -> list[list[tuple[float, float]]]:
    """Returns the points of each line except faint lines."""
    timeline_figure = [e["points"] for e in elements(svg, "polyline") if "faint" not in e["class"]]
    return [[(float(x), float(y)) for x, y in (pair.split(",") for pair in line.split())] for line in timeline_figure]


def scale(svg: str) -> tuple[list[float], list[float]]:
    """Returns values and heights of the left axis's ticks, as read by a person."""
    units = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
    ticks = [e for e in ElementTree.fromstring(svg).iter("text") if e.attrib["text-anchor"] == "end"]
    texts = [str(e.text) for e in ticks]
    values = [float(t[:-1]) * units[t[-1]] if t[-1] in units else float(t) for t in texts]
    return values, [float(e.attrib["y"]) - 3.5 for e in ticks]


@pytest.mark.parametrize(
    "ys", [[0.0, 1.0, 0.5], [-3e-5, 1e-5, 2e-5], [12e6, 13e6, 12.5e6], [0.99995, 1.0, 1.00005], [5.0, 5.0, 5.0]]
)
def test_a_line_stands_where_its_ticks_say(ys: list[float]) -> None:
    svg = plots.lines([Series("a", [0, 1, 2], ys)]).svg
    [line] = points(svg)
    values, heights = scale(svg)
    assert len(values) == len(set(values)) >= 2
    slope = (heights[-1] - heights[0]) / (values[-1] - values[0])
    for (_, height), y in zip(line, ys, strict=True):
        assert height == pytest.approx(heights[0] + slope * (y - values[0]), abs=0.8)
    assert [x for x, _ in line] == pytest.approx([LEFT, (LEFT + WIDTH - RIGHT) / 2, WIDTH - RIGHT], abs=0.1)


def test_decades() -> None:
    svg = plots.lines([Series("a", [1, 2, 3, 4], [1e-6, 1e-4, 0.0, 1e-2])], log=True).svg
    [line] = points(svg)
    assert len(line) == 2, "what has no logarithm is a gap; one point alone is a dot"
    values, heights = scale(svg)
    at = dict(zip(values, heights, strict=True))
    assert line[0][1] == pytest.approx(at[1e-6], abs=0.1) and line[1][1] == pytest.approx(at[1e-4], abs=0.1)


def test_gaps_break_a_line() -> None:
    lines = points(plots.lines([Series("a", list(range(6)), [1.0, 2.0, None, math.nan, 3.0, 4.0])]).svg)
    assert [len(line) for line in lines] == [2, 2]


def test_long_lines_are_thinned_to_means() -> None:
    xs = list(range(10_000))
    svg = plots.lines([Series("a", xs, [float(x) for x in xs])]).svg
    [line] = points(svg)
    assert len(line) <= plots.MOST and len(svg) < 20_000
    slopes = {round((b[1] - a[1]) / (b[0] - a[0]), 1) for a, b in pairwise(line[20:-20])}
    assert max(slopes) - min(slopes) <= 0.3, "a straight line stays one"


@pytest.mark.parametrize("series", [[], [Series("a", [], [])], [Series("a", [1], [None])]])
def test_nothing_to_draw(series: list[Series]) -> None:
    assert points(plots.lines(series).svg) == []


@given(st.lists(st.lists(st.floats(0, 100), min_size=3, max_size=3), min_size=1, max_size=40))
def test_a_stack_is_as_high_as_its_sum(rows: list[list[float]]) -> None:
    drawing = plots.stacked(["a", "b", "c"], list(range(len(rows))), list(map(list, zip(*rows, strict=True))))
    bars = elements(drawing.svg, "rect")
    for bar in bars:
        assert float(bar["y"]) >= TOP - 0.1 and float(bar["y"]) + float(bar["height"]) <= HEIGHT
    total: dict[str, float] = {}
    for bar in bars:
        total[bar["x"]] = total.get(bar["x"], 0.0) + float(bar["height"])
    sums = [sum(row) for row in rows if sum(row) > 0.5]
    if len(total) == len(rows) == len(sums):
        scale = max(total.values()) / max(sums)
        assert list(total.values()) == pytest.approx([s * scale for s in sums], abs=0.4)


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9))
def test_ticks_are_round_and_inside(low: float, span: float) -> None:
    high = low + span
    ticks = plots.ticks(low, high)
    assert len(ticks) <= 6
    slack = 1e-6 * span + 4 * math.ulp(max(abs(low), abs(high)))
    assert all(low - slack <= tick <= high + slack for tick in ticks)
    if len(ticks) > 1:
        step = ticks[1] - ticks[0]
        mantissa = step / 10 ** math.floor(math.log10(step) + 1e-9)
        assert min(abs(mantissa - m) for m in (1, 2, 2.5, 5, 10)) < 1e-3 * max(1, abs(low) / span)


@pytest.mark.parametrize(
    "value, step, text",
    [
        (0, 1, "0"),
        (1200, 200, "1.2k"),
        (3e-5, 1e-5, "3e-5"),
        (0.25, 0.25, "0.25"),
        (3.6e6, 2e5, "3.6M"),
        (-0.005, 0.005, "-0.005"),
    ],
)
def test_short_labels(value: float, step: float, text: str) -> None:
    assert plots.short(value, step) == text


def test_marks_stand_between_the_steps() -> None:
    marks = [plots.Mark(x, f"at <{x}>", "resumed") for x in (-5.0, 1.5, 3.5, 9.0)]
    drawing = plots.lines([Series("a", [0, 1, 2, 3], [1.0, 2.0, 3.0, 2.0])], marks=marks)
    lines = [float(e["x1"]) for e in elements(drawing.svg, "line") if e.get("class") is None]
    inner = WIDTH - RIGHT - LEFT
    assert lines == pytest.approx([LEFT + inner * 1.5 / 3, WIDTH - RIGHT], abs=0.1), "the run has not gone on yet"
    assert [mark.x for mark in drawing.marks] == [1.5, 3.0] and "at &lt;1.5&gt;" in drawing.svg
    assert "mark resumed" in plots.stacked(["a"], [1, 2], [[1.0, 2.0]], marks[1:2]).svg


@pytest.mark.parametrize(
    "values, flat",
    [
        ([0.0, 0.0, 0.0], True),
        ([0.1 + 0.2, 0.3, 0.3], True),
        ([1.0, 1.0 + 1e-7, 1.0], True),
        ([1.0, 1.0 + 1e-5, 1.0], False),
        ([1e-6, 1e-6, 2e-6], False),
        ([None, 1.0, 1.0], False),
        ([1.0, None, 1.0], False),
    ],
)
def test_values_without_a_change_are_flat(values: list[float | None], flat: bool) -> None:
    assert plots.is_flat(values) is flat


def test_colours_are_classes_of_the_page() -> None:
    svg = plots.stacked(["<a>"], [1.0], [[2.0]]).svg
    assert "style=" not in svg and "&lt;a&gt; 2 s" in svg
    assert re.search(r'class="bar s0"', svg)
