"""Console output for a person and for a program."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import rich.console

from skyrl_mega.telemetry import console as module
from skyrl_mega.telemetry import events, table
from skyrl_mega.telemetry.console import Console
from skyrl_mega.telemetry.events import Event
from tests.conftest import ROOT

METRICS = {
    "reward/mean": 0.4375,
    "eval/a/mean": 0.5,
    "eval/b/mean": 0.7,
    "eval/a/pass_at_4": 1.0,
    "policy/loss": -1.25e-5,
    "mismatch/logprob_abs_mean": 2.3e-7,
    "perf/tokens_per_s": 23456.7,
    "time/step": 61.5,
}


def test_columns_are_aligned_and_say_what_was_not_measured() -> None:
    head, row = table.header(), table.row(12, METRICS)
    assert len(head) == len(row)
    ends = [index + 1 for index, (a, b) in enumerate(zip(head, head[1:] + " ", strict=True)) if a != " " and b == " "]
    cells = dict(zip(head.split(), [row[:end].split()[-1] for end in ends], strict=True))
    assert cells["step"] == "12"
    assert (cells["reward"], cells["eval"], cells["loss"]) == ("0.438", "0.600", "-1e-05")
    assert (cells["tokens/s"], cells["seconds"], cells["sync"]) == ("23457", "61.500", "·")


def test_there_is_no_mean_over_sets_where_all_of_one_failed() -> None:
    """Omits the mean over sets after a set failed: the mean would cover other sets than in earlier steps."""
    assert table._value("eval/*/mean", METRICS) == pytest.approx(0.6)
    assert table._value("eval/*/mean", {**METRICS, "eval/c/failed": 1.0}) is None
    assert table._value("eval/*/mean", {**METRICS, "eval/b/failed": 0.5}) == pytest.approx(0.6)


@pytest.mark.parametrize(
    "value", [0.0, 1e-12, -1e-12, 0.999, 99.9996, -123.4, 99999.0, -1e30, float("nan"), float("-inf")]
)
def test_a_figure_fits_its_column(value: float) -> None:
    assert len(table.number(value)) <= 7
    assert float(table.number(value)) == pytest.approx(value, rel=0.5, abs=1e-3, nan_ok=True)


def test_durations() -> None:
    assert [table.duration(s) for s in (4.12, 59.96, 125, 11520)] == ["4.1 s", "60.0 s", "2 min 5 s", "3 h 12 min"]


def test_plain_lines_where_there_is_no_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUIET_S", 0.0)
    monkeypatch.setattr(module, "WORTH_A_LINE_S", 0.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 5.0, strftime=time.strftime))
    out = io.StringIO()
    with Console(out) as console:
        console.log_to(tmp_path / "logs" / "run.log")
        with console.phase("generate", total=4) as phase:
            phase.update(2)
        with pytest.raises(RuntimeError), console.phase("train"):
            raise RuntimeError
        for step in range(module.HEADER_EVERY + 1):
            console.step(step, METRICS)
    lines = out.getvalue().splitlines()
    assert lines[:3] == ["generate …", "generate 2/4, 0.0 s", "generate done in 0.0 s"]
    assert lines[3:5] == ["train …", "train failed after 0.0 s"]
    assert lines.count(table.header()) == 2
    assert len(lines) == 5 + 2 + module.HEADER_EVERY + 1
    log = (tmp_path / "logs" / "run.log").read_text().splitlines()
    assert [line[21:] for line in log] == lines


def test_the_log_is_utf_8_in_every_locale(tmp_path: Path) -> None:
    program = """
import io, pathlib, sys
from skyrl_mega.telemetry.console import Console
with Console(io.StringIO()) as console:
    console.log_to(pathlib.Path(sys.argv[1]))
    console.say("4 \\u2192 2 \\u2026")
"""
    ascii_only = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    log = tmp_path / "run.log"
    subprocess.run([sys.executable, "-c", program, str(log)], cwd=ROOT, env=ascii_only, check=True, timeout=120)
    assert log.read_text(encoding="utf-8").endswith("  4 → 2 …\n")


def test_a_closed_console_still_takes_events(tmp_path: Path) -> None:
    console = Console(io.StringIO())
    console.events_to(tmp_path)
    console.close()
    console.say(Event("step", "after the end", step=1))
    assert not (tmp_path / events.FILE).read_text()


def test_a_phase_that_a_signal_has_ended_has_not_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WORTH_A_LINE_S", 0.0)
    out = io.StringIO()
    with Console(out, ended_by=lambda error: "SIGTERM" if isinstance(error, EOFError) else "") as console:
        for error in (EOFError, ValueError):
            with pytest.raises(error), console.phase("generate"):
                raise error
    first, second = out.getvalue().splitlines()[1:]
    assert first.startswith("generate ended by SIGTERM after ") and second.startswith("generate failed after ")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_secret_is_printed_on_a_terminal_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.setenv(name, "1")
    shown = {}
    for out in (Terminal(), io.StringIO()):
        with Console(out) as console:
            console.log_to(tmp_path / "run.log")
            console.show_secret("token: 1234", "token: in a file")
        shown[type(out)] = out.getvalue()
    assert shown == {Terminal: "token: 1234\n", io.StringIO: "token: in a file\n"}
    assert "1234" not in (tmp_path / "run.log").read_text()


def test_one_live_line_on_a_terminal_and_none_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = Terminal()
    assert rich.console.Console(file=out).is_terminal
    with Console(out) as console:
        with console.phase("outer"), console.phase("generate", total=10) as phase:
            phase.update(7)
            time.sleep(0.3)
        console.say("after")
    text = out.getvalue()
    assert "generate" in text and "7/10" in text
    assert "\x1b[?25l" in text and text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor is back"
    assert text.endswith("after\n")
    assert "generate …" not in text


def test_the_summary_says_before_after_and_where(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "metrics.jsonl").touch()
    out = io.StringIO()
    with Console(out) as console:
        before = {"eval/a/mean": 0.41, "eval/a/of/agent_ignored_parameters": 1.0, "eval/a/of/agent_dropped_tokens": 0.0}
        after = dict.fromkeys(before, 0.0) | {"eval/a/mean": 0.93, "eval/b/mean": 0.2, "eval/a/of/format": 0.0}
        console.summary(tmp_path, before, after)
    text = " ".join(out.getvalue().split())
    assert "eval/a/mean 0.410 → 0.930 (+0.520)" in text
    assert "eval/b/mean 0.200" in text and "of/format 0" in text
    assert "ignored_parameters 1" in text and "dropped_tokens" not in text
    assert str(tmp_path / "checkpoints") in text and str(tmp_path / "metrics.jsonl") in text
    assert "trajectories" not in text


def test_json_has_one_object_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Console(as_json=True) as console:
        console.say("hello")
        console.step(1, {"policy/loss": float("nan"), "reward/mean": 0.5})
        console.summary(tmp_path, {}, {"eval/a/mean": 0.5})
    captured = capsys.readouterr()
    step, summary = [json.loads(line) for line in captured.out.splitlines()]
    assert step == {"step": 1, "policy/loss": None, "reward/mean": 0.5}
    assert summary["done"] and summary["after"] == {"eval/a/mean": 0.5}
    assert "hello" in captured.err
