"""The story of a run: header, starts, changes, marks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from skyrl_mega.report import __main__ as command
from skyrl_mega.report import header, overview, run_data
from skyrl_mega.report.run_data import RunData
from tests.report.cases import BEGAN, events, metrics, run_folder, when
from tests.report.test_overview import text_of

STARTED = {
    "kind": "started",
    "text": "started on node-1: grpo with loss ppo",
    "algorithm": "grpo with loss ppo",
    "model": {
        "path": "models/m",
        "type": "qwen3_moe",
        "parameters": 30_532_122_624,
        "active": 3_000_000,
        "dtype": "bf",
    },
    "layout": {"policy": "8 ranks (tensor 2, data 4)", "engines": "4 (tensor 2)"},
    "gpus": 36,
    "host": "node-1",
    "commit": "aaaa",
    "versions": {"python": "3.12", "torch": "2.9.0", "skyrl-mega": "0.1.0"},
}
CHANGED = {"kind": "settings_changed", "changes": ["policy.optimizer.lr 1e-06 → 2e-06"]}
PLACED = {"kind": "placed", "hosts": ["node-1 (10.0.0.1)", "node-2 (10.0.0.2)"]}


def step(number: int, after: float) -> dict[str, Any]:
    return {"kind": "step", "step": number, "time": BEGAN + after}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Returns a run of six steps, killed after step 5 and resumed after step 4 by other code with another setting."""
    folder = run_folder(tmp_path / "mine")
    metrics(folder, [{"step": s, "reward/mean": s / 7, "time/step": 5.0, "time/train": 5.0} for s in range(1, 7)])
    lost = {"kind": "actor_lost", "text": "engine-1 is out of service: died", "actor": "engine-1", "after_step": 2}
    later = {"time": BEGAN + 100_000.0}
    events(
        folder,
        STARTED,
        {"kind": "stage", "actors": "engine", "stage": "load the model", "count": 4},
        {"kind": "stage_done", "actors": "engine", "stage": "load the model", "count": 4, "seconds": 61.0},
        PLACED,
        lost,
        step(5, 36_000.0),
        {**CHANGED, **later},
        {**STARTED, **later, "commit": "bbbb", "versions": {"python": "3.12", "torch": "2.10.0"}},
        {"kind": "resumed", "step": 4, "text": "resuming after step 4", "after_step": 4, **later},
        step(6, 110_000.0),
    )
    return folder


def test_gpu_hours_are_those_between_a_start_and_its_last_event(run: Path) -> None:
    first, second = run_data.read(run).starts
    assert (first.gpu_hours, second.gpu_hours) == (pytest.approx(360.0), pytest.approx(100.0))
    assert dict(header.facts(run_data.read(run)))["GPU-hours"].startswith("460.00 in ")


def test_the_header_says_what_ran_where_with_which_code(run: Path) -> None:
    facts = dict(header.facts(run_data.read(run)))
    assert facts["algorithm"] == "grpo with loss ppo"
    assert facts["model"] == "models/m: qwen3_moe, 30.5 B parameters, 3 M active, bf"
    assert facts["layout"] == "policy: 8 ranks (tensor 2, data 4); engines: 4 (tensor 2)"
    assert facts["hosts"] == "node-1 (10.0.0.1), node-2 (10.0.0.2); 36 GPUs"
    assert (facts["commit"], facts["versions"]) == ("bbbb", "torch 2.10.0, python 3.12")
    assert facts["dates"].startswith(f"started {when(0)}, last step {when(110_000)}; 2 starts")
    text = text_of(overview.write([run]).read_text())
    assert all(value in text for value in facts.values())


def test_a_resume_is_marked_with_what_changed(run: Path) -> None:
    failure, resume = run_data.read(run).marks
    assert (failure.step, failure.kind) == (2.5, "failure") and "engine-1" in failure.text
    assert (resume.step, resume.kind) == (4.5, "changed")
    assert resume.text.splitlines() == [
        "resumed after step 4",
        "policy.optimizer.lr 1e-06 → 2e-06",
        "commit aaaa → bbbb",
        "torch 2.9.0 → 2.10.0",
        "skyrl-mega 0.1.0 → unknown",
    ]
    page = overview.write([run]).read_text()
    plots = page.count("<figure id=")
    assert plots >= 2 and page.count('class="mark changed"') == page.count('class="mark failure"') == plots
    assert "<title>resumed after step 4\npolicy.optimizer.lr 1e-06 → 2e-06\n" in page


def test_the_seconds_of_a_start_by_actors(run: Path) -> None:
    first = run_data.read(run).starts[0]
    assert [(s.actors, s.stage, s.count, s.seconds) for s in first.stages] == [("engine", "load the model", 4, 61.0)]


def test_the_terminal_tells_the_same(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["run", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "mine" and lines[-1] == str(run / "report.html")
    assert any(line.split() == ["commit", "bbbb"] for line in lines)
    assert any("settings changed" in line for line in lines)
    assert any(line.strip() == "policy.optimizer.lr 1e-06 → 2e-06" for line in lines)
    assert any("after 2" in line and "engine-1 is out of service" in line for line in lines)


@pytest.mark.parametrize(
    "row",
    [
        {"kind": "started"},
        {"kind": "started", "model": 3, "layout": [1], "versions": "2", "gpus": "many"},
        {"kind": "started", "model": {"parameters": "x"}},
        {"kind": "stage_done", "seconds": "long", "count": None},
        {"kind": "resumed", "step": "four"},
        {"kind": "placed", "hosts": 7},
        {"kind": "settings_changed", "changes": {"a": 1}},
    ],
)
def test_events_with_other_fields_break_nothing(tmp_path: Path, row: dict[str, Any]) -> None:
    folder = run_folder(tmp_path / "r")
    events(folder, {**STARTED}, row, {"kind": "step", "step": 1})
    data = run_data.read(folder)
    assert isinstance(data, RunData) and header.text(data)
    overview.write([folder])


def test_runs_of_earlier_versions_have_no_header(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "r")
    assert header.facts(run_data.read(folder)) == [] and header.html([run_data.read(folder)], ["r"]) == ""


def test_facts_of_several_runs_stand_side_by_side(run: Path, tmp_path: Path) -> None:
    other = run_folder(tmp_path / "other")
    events(other, {**STARTED, "algorithm": "reinforce with loss ppo"}, {"kind": "step", "step": 1})
    page = overview.write([run, other], tmp_path / "both.html").read_text()
    head = page[page.index("class='facts'") : page.index("</section>")]
    assert "<th class=differs>algorithm</th><td>grpo with loss ppo</td><td>reinforce with loss ppo</td>" in head
    assert "<th>model</th>" in head and "mine: resumed after step 4" in page
