"""A run's page."""

from __future__ import annotations

import re
import time
from html import unescape
from pathlib import Path

import pytest

from skyrl_mega.cli.train import FAULT
from skyrl_mega.cli.train import main as launch
from skyrl_mega.cluster.errors import ClusterError
from skyrl_mega.common.errors import UserError
from skyrl_mega.report import incidents, overview, run_data
from tests.report.cases import events, metrics, run_folder, when
from tests.support.machine import within

STEP = {"kind": "step", "step": 1}


def text_of(page: str) -> str:
    """Returns the text visible to a reader, without script and data."""
    return unescape(re.sub(r"<(style|script)\b.*?</\1>|<[^>]*>", "\n", page, flags=re.DOTALL))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = run_folder(tmp_path / "mine")
    rows: list[dict[str, float | None]] = [{"step": 0, "eval/a/mean": 0.5}]
    for step in (1, 2, 3):
        rows.append({"step": step, "reward/mean": step / 4, "time/step": 10.0, "time/generate": 6.0, "time/train": 4.0})
    rows[-1] |= {"eval/a/mean": 0.75, "policy/loss": None, "rollout/tokens": 600.0}
    metrics(folder, rows)
    (folder / "checkpoints" / "step_000003").mkdir(parents=True)
    (folder / "checkpoints" / "step_000003" / "state.json").write_text("{}" + " " * 1_999_998)
    (folder / "checkpoints" / "step_000004.partial").mkdir()
    (folder / "checkpoints" / "step_000004.partial" / "state.json").write_text("{}")
    return folder


def test_a_run_at_a_glance(run: Path) -> None:
    assert overview.write([run]) == run / "report.html"
    text = text_of((run / "report.html").read_text())
    for expected in ("3 of 4", "0.250 → 0.750", "0.500 → 0.750", "30.0 s", "10.0 s a step", "step_000003", "2.0 MB"):
        assert expected in text, expected
    assert re.search(r"generate\s+60%", text) and re.search(r"train\s+40%", text)
    assert "step_000004" not in text
    assert "gradient norm" not in text, "what was not measured has no plot"


def test_settings_that_are_not_the_defaults(run: Path) -> None:
    assert run_data.read(run).changed == {"run.name": "mine", "run.steps": 4, "rollout.options": {"seed": 1}}
    with (run / "config.yaml").open("a") as file:
        file.write("future: {key: 1}\n")
    assert run_data.read(run).changed["future.key"] == 1, "a key that this version does not know is shown"
    assert "unknown key" in overview.write([run]).read_text()


def test_several_runs(run: Path, tmp_path: Path) -> None:
    other = run_folder(tmp_path / "other")
    metrics(other, [{"step": 1, "reward/mean": 0.9, "time/step": 1.0, "time/new": 1.0}])
    page = overview.write([run, other], tmp_path / "both.html").read_text()
    assert re.findall(r"<th class=differs>([^<]*)", page) == ["run.name"]
    assert text_of(page).count("where a step's time goes") == 2
    assert not (run / "report.html").exists()


def test_a_fault_stands_above_all_else(run: Path) -> None:
    events(run, STEP, {"kind": "fault", "text": "fault: policy-0 failed in train: a\nb"})
    assert run_data.read(run).fault == run_data.RunFault(when(1), "policy-0 failed in train: a\nb", last=True)
    text = text_of(overview.write([run]).read_text())
    assert f"The run ended by a fault at {when(1)}" in text and "policy-0 failed in train: a" in text


def test_a_run_that_went_on_says_so(run: Path) -> None:
    events(run, {"kind": "fault", "text": "fault: first"}, {"kind": "fault", "text": "fault: second"}, STEP)
    assert run_data.read(run).fault == run_data.RunFault(when(1), "second", last=False)
    assert "The run was resumed after a fault" in overview.write([run]).read_text()


def test_crashes_that_a_run_recovered_from(run: Path) -> None:
    lost = [
        {"kind": "actor_lost", "text": "engine-1 is out of service: it died", "actor": "engine-1"},
        {"kind": "actor_lost", "text": "rollout-0 is out of service: it died", "actor": "rollout-0"},
        {"kind": "trajectory_failed", "text": "trajectory 3/1 has failed", "trajectory": "3/1"},
        {"kind": "retriever_lost", "text": "retriever: ended (1); restarting it", "code": 1},
    ]
    events(run, *lost, {"kind": "actor_back", "text": "engine-1 restarted"}, STEP)
    data = run_data.read(run)
    assert data.fault is None and [event.text for event in data.recovered] == [row["text"] for row in lost]
    text = text_of(overview.write([run]).read_text())
    assert "recovered from 4 crashes" in text and all(str(row["text"]) in text for row in lost)


def test_a_crash_without_a_restart_left_is_no_recovery(run: Path) -> None:
    back = {"kind": "actor_back", "text": "rollout-0 restarted", "actor": "rollout-0"}
    given_up = {"kind": "actor_given_up", "text": "rollout-0 is out of service: it died", "actor": "rollout-0"}
    fatal = {"kind": "actor_given_up", "text": "engine-1 is out of service: it died", "actor": "engine-1"}
    fault = {"kind": "fault", "text": "fault: engine-1 failed in service: it died"}
    events(run, given_up, back, STEP, fatal, fault, {"kind": "actor_back", "actor": "engine-1"})
    data = run_data.read(run)
    assert [event.text for event in data.given_up] == [fatal["text"]]
    assert [event.text for event in data.recovered] == [given_up["text"]], "restarted after all"
    text = text_of(overview.write([run]).read_text())
    assert "given up after a crash, with no restart left: engine-1" in text and "recovered from a crash" in text


def test_a_retrieval_service_that_stays_down_is_no_recovery(run: Path) -> None:
    again = {"kind": "retriever_lost", "text": "retriever: ended (1); restarting it", "code": 1, "restarted": True}
    down = {"kind": "retriever_lost", "text": "retriever: stays down", "code": 1, "restarted": False}
    events(run, again, down, STEP)
    data = run_data.read(run)
    assert [event.text for event in data.recovered] == [again["text"]]
    text = text_of(overview.write([run]).read_text())
    assert "given up after a crash, with no restart left: retriever" in text and "recovered from a crash" in text


def test_failed_trajectories_are_listed_by_kind(run: Path) -> None:
    raised = {"status": "error_env", "environment": "m", "error": "raised KeyError(…)", "at": "", "count": 3}
    late = {"status": "error_env_timeout", "environment": "m", "error": "took longer", "at": "", "count": 2}
    events(
        run,
        {"kind": "failures", "step": 2, "of": 8, "kinds": [{**raised, "example": "raised KeyError('<a>')"}]},
        {"kind": "failures", "step": 3, "of": 8, "kinds": [{**late, "count": 9, "example": "lost by the resume"}]},
        {"kind": "resumed", "step": 2},
        {"kind": "failures", "step": 3, "of": 8, "kinds": [{**late, "example": "b"}, {**raised, "example": "c"}]},
        {"kind": "failures", "step": 4, "kinds": "broken"},
    )
    assert [(f.status, f.count, f.steps, f.example) for f in run_data.read(run).failures] == [
        ("error_env", 6, [2, 3], "raised KeyError('<a>')"),
        ("error_env_timeout", 2, [3], "b"),
    ]
    text = text_of(overview.write([run]).read_text())
    assert "8 failed trajectories by kind" in text and "raised KeyError('<a>')" in text and "--error TEXT" in text
    assert incidents.text(run_data.read(run)) == [
        "  failed: 6 error_env, 2 steps, 2 to 3, such as: raised KeyError('<a>')",
        "  failed: 2 error_env_timeout, step 3, such as: b",
    ]


def test_curves_without_a_change_are_small(run: Path) -> None:
    rows = [{"step": s, "policy/loss": s / 7, "policy/lr": 1e-6, "policy/kl": 0.0} for s in (1, 2, 3)]
    metrics(run, [*rows, {"step": 4, "policy/loss": 0.3, "policy/lr": 1e-6, "policy/entropy": 1.0}])
    page = overview.write([run]).read_text()
    titles = re.findall(r"<figcaption>([^<]*)", page)
    small = re.findall(r"class='unchanged'>(.*?) <", page)
    assert [title.strip() for title in titles] == ["loss", "entropy"], (
        "too few values to say that the entropy is unchanged"
    )
    assert small == ["KL", "learning rate"]


def test_events_that_are_damaged_are_left_out(run: Path) -> None:
    (run / "events.jsonl").write_text('{"kind": "fault"}\n[]\n\x00\n{"time": 1, "kind": "fault", "text": "fa')
    assert run_data.read(run).fault is None


def test_a_run_that_has_just_begun(tmp_path: Path) -> None:
    assert "0 of 4" in text_of(overview.write([run_folder(tmp_path / "r")]).read_text())


@pytest.mark.parametrize("content, part", [(None, "no config.yaml there"), ("a: [", "it is not YAML")])
def test_no_run(tmp_path: Path, content: str | None, part: str) -> None:
    if content is not None:
        (tmp_path / "config.yaml").write_text(content)
    with pytest.raises(UserError, match=part) as caught:
        overview.write([tmp_path])
    assert "\n" not in str(caught.value)


def test_a_long_run_is_quick_and_small(run: Path) -> None:
    names = [f"{group}/x{i}" for group in ("policy", "sync") for i in range(20)]
    names += [
        metric for _, plots in overview.SECTIONS for plot in plots for metric in plot.metrics if "*" not in metric
    ]
    metrics(run, [{"step": s, **dict.fromkeys(names, 1.0 + s % 7)} for s in range(2000)])
    start = time.process_time()
    file = overview.write([run])
    assert within(time.process_time() - start, 5), "it is written at the end of every run"
    assert file.stat().st_size < 3_000_000


def test_a_page_that_cannot_be_written_is_said_and_ends_nothing(tmp_path: Path) -> None:
    messages: list[str] = []
    overview.write_at_end(tmp_path / "absent", messages.append)
    assert len(messages) == 1 and messages[0].startswith("report.html was not written: UserError(")


@pytest.mark.parametrize("error", [ClusterError("Ray is gone"), ZeroDivisionError("in the loop")])
def test_a_run_that_fails_leaves_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    from skyrl_mega.cli import inputs, prepare, refusal
    from skyrl_mega.trainer import train

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(train, "train", fail)
    monkeypatch.setattr(inputs, "check_inputs", lambda config, say: {})
    monkeypatch.setattr(prepare, "prepare", lambda config, console: config)
    monkeypatch.setattr(refusal, "find_error", lambda config, hf, planned: None)
    (tmp_path / "c.yaml").write_text(f"run: {{name: r, directory: {tmp_path}}}\ncluster: {{device: cpu}}\n")
    arguments = [
        "--config",
        str(tmp_path / "c.yaml"),
        "data.prompts_per_step=4",
        "model.path=m",
        "data.train=[t.parquet]",
    ]
    if isinstance(error, ClusterError):
        assert launch(arguments) == FAULT
    else:
        with pytest.raises(ZeroDivisionError):
            launch(arguments)
    text = text_of((tmp_path / "r" / "report.html").read_text())
    assert "The run ended by a fault" in text and str(error) in text


def test_what_a_run_noticed_about_itself(run: Path) -> None:
    rows = [{"step": s, "reward/mean": 0.0, "health/nothing_parsed": 1.0, "health/stuck_steps": s} for s in (1, 2, 3)]
    rows.append({"step": 4, "health/slow": 1.0, "health/stuck_steps": 0.0})
    metrics(run, [*rows, {"step": 5, "health/stuck_steps": 0.0}])
    events(run, {"kind": "health", "step": 1, "finding": "nothing_parsed", "evidence": "'guess': null; e.g. '<b>'"})
    data = run_data.read(run)
    assert [(n.kind, n.steps, n.text) for n in data.findings] == [
        ("nothing_parsed", [1, 2, 3], "'guess': null; e.g. '<b>'"),
        ("slow", [4], ""),
    ]
    text = text_of(overview.write([run]).read_text())
    assert "What the run noticed about itself" in text and "3 steps, 1 to 3" in text and "e.g. '<b>'" in text
