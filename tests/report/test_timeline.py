"""The timeline of a run: as a picture, as text, and as a trace."""

from __future__ import annotations

import gzip
import json
import re
from html import unescape
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from skyrl_mega.cli.report import main
from skyrl_mega.report import gantt, overview, timeline
from skyrl_mega.telemetry.trace import ENGINES
from tests.report.cases import metrics, run_folder, timelines
from tests.telemetry.trace_format import properly_nested, tracks

COLOURS = {"generate": 0, "train": 1, "sync": 2, "checkpoint": 3}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = run_folder(tmp_path / "mine")
    rows = [{"step": step, "time/step": 10.0, "time/generate": 5.0, "time/train": 2.5} for step in (1, 2, 3, 4)]
    metrics(folder, rows)
    timelines(folder, 5)  # a resume took the fifth back: no row exists
    return folder


def drawing(run: Path, steps: tuple[float, float]) -> ElementTree.Element:
    return ElementTree.fromstring(gantt.picture(timeline.read(run, steps), COLOURS))


def texts(svg: ElementTree.Element) -> list[str]:
    return [text.text or "" for text in svg.iter("text")]


def boxes(svg: ElementTree.Element, style: str) -> list[tuple[float, float]]:
    """Returns the left end and width of each box."""
    rectangles = [box for box in svg.iter("rect") if box.attrib["class"] == style]
    return [(float(box.attrib["x"]), float(box.attrib["width"])) for box in rectangles]


def test_the_page_has_the_newest_steps(run: Path) -> None:
    page = unescape(overview.write([run]).read_text())
    assert re.findall(r">(step \d)<", page) == ["step 2", "step 3", "step 4"]
    assert "Who did what when" in page and "engine 1" in page and "engine 2" not in page
    assert re.search(r"idle/engines <b>40%</b>.*idle/policy <b>65%</b>", page)


def test_phases_stand_where_they_were(run: Path) -> None:
    """Measures phases: a second is 1084 / 10 wide, and the policy's line repeats its own phases."""
    svg = drawing(run, (1, 1))
    second = (gantt.WIDTH - gantt.LEFT - gantt.RIGHT) / 10
    assert boxes(svg, "bar s0") == [pytest.approx((gantt.LEFT, 5 * second), abs=0.1)]
    assert boxes(svg, "bar s1") == [pytest.approx((gantt.LEFT + 5.5 * second, 2.5 * second), abs=0.1)] * 2
    assert boxes(svg, "updated") == [pytest.approx((gantt.LEFT + 8 * second, second), abs=0.1)] * 2
    assert "step 1" in texts(svg) and "▾ v1" in texts(svg) and "10 s" in texts(svg)


def test_a_picture_of_many_steps_and_engines_is_readable(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "large")
    timelines(folder, 30, engines=64)
    svg = drawing(folder, (1, 30))
    lines = [label for label in texts(svg) if label.startswith("engine")]
    assert lines == [f"engines {4 * i}–{4 * i + 3}" for i in range(16)]
    labels = [(float(t.attrib["x"]), t.text or "") for t in svg.iter("text") if "text-anchor" not in t.attrib]
    assert len(labels) > 10
    for (one, label), (other, _) in pairwise(sorted(labels)):
        assert other - one >= 6 * len(label), label
    assert len(ElementTree.tostring(svg)) < 400_000


def test_heights_are_requests(run: Path) -> None:
    """Measures heights: engine 1 runs twice the requests of engine 0, at most ten, enough to fill its line."""
    paths = [path.attrib["d"] for path in drawing(run, (1, 1)).iter("path") if path.attrib["class"] == "area s0"]
    tops = [[float(y) for y in re.findall(r"V([\d.]+)", path)] for path in paths]
    heights = [max(ys) - min(ys) for ys in tops]
    assert heights == [pytest.approx(8), pytest.approx(16)]
    assert all(6 <= len(set(ys)) <= 12 for ys in tops), "five counts, none, and a column at each change"
    second = (gantt.WIDTH - gantt.LEFT - gantt.RIGHT) / 10
    for path in paths:
        falls = [float(x) for x in re.findall(r"H([\d.]+)", path)][1:-1]  # between the rise and the right end
        assert {round((x - gantt.LEFT) / second) for x in falls} - {0} == {1, 2, 3, 4, 5}


def test_text_tells_the_same(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["timeline", str(run), "--step", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step 2  10.0 s  idle: engines 40%, policy 65%, environments 81%"
    driver, policy, engines, environments = (line[16:] for line in lines[1:5])
    assert (driver.count("g"), driver.count("t"), driver.count("s")) == (36, 18, 7)
    assert (len(policy.strip()), len(engines.strip())) == (25, 36) and engines.strip() == "█" * 36
    assert environments[0] == "█" and environments[35] == "▂" and len(environments) == 36
    assert lines[5] == "c checkpoint  g generate  t train  s sync"


def test_a_trace_has_all_steps_on_one_axis(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "trace.json.gz"
    assert main(["timeline", str(run), "--step", "1..3", "--trace", str(file)]) == 0
    spans_by_track = tracks(file)
    assert sorted(spans_by_track) == ["driver", "engine-0", "engine-1", "policy"]
    assert all(properly_nested(spans) for spans in spans_by_track.values())
    starts = {span["name"]: span["ts"] for span in spans_by_track["driver"] if span["name"].startswith("step")}
    assert starts == {"step 1": 0, "step 2": pytest.approx(12e6), "step 3": pytest.approx(22e6)}
    assert [span["name"] for span in spans_by_track["engine-1"]] == [f"weights of step {step}" for step in (1, 2, 3)]
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    points = [(e["ts"], e["args"]["requests"]) for e in events if e["ph"] == "C" and e["pid"] == ENGINES + 1]
    assert points == sorted(points, key=lambda point: point[0]) and points[-1][1] == 0

    def value(second: float) -> float:
        return [count for at, count in points if at <= second * 1e6][-1]

    assert [value(second) for second in (0.5, 1.5, 4.5, 7.0, 11.0, 12.5, 22.5)] == [10, 8, 2, 0, 0, 10, 10]


def test_a_trace_says_that_nothing_is_known_between_steps(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "r")
    timelines(folder, 3)
    (folder / "timeline" / "step_000002.json.gz").unlink()
    assert main(["timeline", str(folder), "--trace", str(tmp_path / "t.json.gz")]) == 0
    events = json.loads(gzip.decompress((tmp_path / "t.json.gz").read_bytes()))["traceEvents"]
    zeros = [e["ts"] for e in events if e["ph"] == "C" and e["name"] == "calls" and not e["args"]["calls"]]
    assert 10e6 in [pytest.approx(at) for at in zeros], "at the first step's end"


@pytest.mark.parametrize(("option", "name"), [("--html", "who.html"), ("--trace", "t.json.gz")])
def test_a_file_of_a_user_is_not_written_over(
    run: Path, tmp_path: Path, option: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / name
    for _ in range(2):
        assert main(["timeline", str(run), option, str(file)]) == 0, "its own file it replaces"
    file.write_text("<!DOCTYPE html>\n<html>mine</html>")
    assert main(["timeline", str(run), option, str(file)]) == 2
    assert f"{name} was not written by this command" in capsys.readouterr().err
    assert file.read_text().endswith("mine</html>")


def test_a_page_of_the_picture_alone(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "who.html"
    assert main(["timeline", str(run), "--html", str(file)]) == 0
    assert "step 5" in file.read_text()


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--step", "9"], "no such step has a timeline"),
        (["--step", "x"], "allowed: a number, or a range"),
        (["--trace", "t.json"], "ends in .json.gz"),
        (["--trace", "/nowhere/t.json.gz"], "allowed: a file in a folder that you may write to"),
    ],
)
def test_what_is_refused(run: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["timeline", str(run), *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_a_run_without_timelines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_folder(tmp_path / "r")
    assert main(["timeline", str(folder)]) == 2
    assert "telemetry.timeline=true" in capsys.readouterr().err
    assert "Who did what when" not in overview.write([folder]).read_text()


def test_a_broken_file_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = run / "timeline" / "step_000004.json.gz"
    file.write_bytes(file.read_bytes()[:-10])
    (run / "timeline" / ".step_000003.json.gz.0123abcd").write_bytes(b"half")  # the remains of a kill are ignored
    assert main(["run", str(run)]) == 2
    error = capsys.readouterr().err
    assert str(file) in error and "remove it" in error
