"""Trackers by name and by import path; failing, hanging and slow trackers during a run."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from skyrl_mega.cli.inputs import planned_inputs
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.compose import compose
from skyrl_mega.config.schema import Config, TelemetryConfig
from skyrl_mega.telemetry.metrics import read
from skyrl_mega.telemetry.trackers import guarded, registry
from skyrl_mega.telemetry.trackers.base import TrajectoryText
from skyrl_mega.telemetry.trackers.guarded import Guarded
from skyrl_mega.telemetry.trackers.jsonl import JsonlTracker
from skyrl_mega.telemetry.trackers.trackers import Trackers, open_trackers

OWN = """
import json
from skyrl_mega.config.options import number

class Lines:
    OPTIONS = {"factor": number(1.0, "what figures are multiplied with", low=0)}

    def __init__(self, folder, options):
        self.file, self.factor = (folder / "lines.txt").open("a"), options["factor"]

    def start(self, config, resumed_step):
        print(json.dumps([config["run"]["name"], config["environment"]["options"], resumed_step]), file=self.file)

    def log(self, step, metrics):
        print(step, {name: value * self.factor for name, value in metrics.items()}, file=self.file)

    def log_trajectories(self, step, trajectories):
        print(step, [t.response for t in trajectories], file=self.file)

    def close(self, failed=False):
        print("failed" if failed else "done", file=self.file)
        self.file.close()

class Half:
    def start(self, config, resumed_step):
        pass
"""
TEXT = TrajectoryText("1+1=", "2", 1.0, "done", "addition")


class Fake:
    """A tracker that fails in the calls named by `faults`: (method, step), with a number of failures."""

    def __init__(self, faults: dict[tuple[str, int], int] | None = None) -> None:
        self.faults = faults or {}
        self.calls: list[tuple[str, int]] = []
        self.hold = threading.Event()
        self.hold.set()

    def _called(self, name: str, step: int) -> None:
        assert self.hold.wait(60)
        if self.faults.get((name, step), 0):
            self.faults[name, step] -= 1
            raise ConnectionError(f"no answer from https://me:{'pass' * 3}@host/{name}\nat all")
        self.calls.append((name, step))

    def start(self, config: Mapping[str, Any], resumed_step: int | None) -> str | None:
        self._called("start", resumed_step or 0)
        return "writes to a list"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._called("log", step)

    def log_trajectories(self, step: int, trajectories: Sequence[TrajectoryText]) -> None:
        self._called("log_trajectories", step)

    def close(self, failed: bool = False) -> None:
        self._called("close", int(failed))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def settings(*overrides: str) -> Config:
    return compose(None, overrides)


def refusal(*overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        registry.check(settings(*overrides).telemetry)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_metrics_jsonl_and_tensorboard_are_written_where_nothing_is_said(tmp_path: Path) -> None:
    with open_trackers(Config(), tmp_path, print) as trackers:
        trackers.start(Config(), None)
        for step in (0, 1):
            trackers.log_trajectories(step, [TEXT])
            trackers.log(step, {"reward/mean": step / 4, "time/sync": 1.0, "time/sync/plan": 0.5})
    assert [row["reward/mean"] for row in read(tmp_path / "metrics.jsonl")] == [0, 0.25]
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(0, 0), (1, 0.25)]
    assert [e.value for e in events.Scalars("time/sync/plan")] == [0.5, 0.5]


@pytest.mark.parametrize("named", ["[]", "[jsonl]"])
def test_metrics_jsonl_is_always_there(named: str, tmp_path: Path) -> None:
    config = settings(f"telemetry.trackers={named}")
    with open_trackers(config, tmp_path, print) as trackers:
        trackers.start(config, None)
        trackers.log(1, {"a": 1.0})
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


@pytest.mark.parametrize("path", ["mine.py:Lines", "own_lines:Lines"])
def test_a_users_own_tracker(folder: Path, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads a user's tracker by file and by module, with options under the class name and masked secrets."""
    (folder / "own_lines.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("A_PASSWORD", "correct horse")
    config = settings(
        f"telemetry.trackers=[{path}]",
        "telemetry.options.Lines.factor=2",
        "environment.options.mine.token=swordfish",
        "environment.options.mine.dsn=${oc.env:A_PASSWORD}",
    )
    trackers = open_trackers(config, folder, print)
    trackers.start(config, 3)
    trackers.log_trajectories(4, [TEXT])
    trackers.log(4, {"a": 1.5})
    with contextlib.suppress(OSError), trackers:
        raise OSError("the run fails")
    first, *rest = (folder / "lines.txt").read_text().splitlines()
    assert json.loads(first) == ["run", {"mine": {"token": "***", "dsn": "${oc.env:A_PASSWORD}"}}, 3]
    assert rest == ["4 ['2']", "4 {'a': 3.0}", "failed"]


def test_the_documents_example(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[2] / "docs" / "trackers.md").read_text()
    (folder / "my_tracker.py").write_text(text.partition("```python\n")[2].partition("```")[0])
    given = text.partition("--config my.yaml ")[2].partition("\n\n")[0]
    config = settings(*shlex.split(given.replace("\\\n", " ")))
    with open_trackers(config, folder, print) as trackers:
        trackers.start(config, None)
        for step in range(1, 21):
            trackers.log(step, {"reward/mean": step / 4})
    assert capsys.readouterr().out == "tracker Printer prints every 10 steps\n10 2.5\n20 5.0\n"


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ("telemetry.trackers=[tensorbord]", ["[tensorbord]", "did you mean tensorboard?", "or your own: package.mod"]),
        ("telemetry.trackers=[tensorboard,tensorboard]", ["two trackers are called tensorboard", "name each once"]),
        ("telemetry.trackers=['nowhere.py:A']", ["nowhere.py does not exist"]),
        ("telemetry.trackers=['mine.py:Line']", ["has no class Line", "did you mean Lines?"]),
        ("telemetry.trackers=['mine.py:Half']", ["not a tracker", "start, log, log_trajectories, close"]),
        ("telemetry.options.tensorbord={}", ["telemetry.options.tensorbord", "did you mean tensorboard?"]),
        ("telemetry.options.tensorboard.flush=3", ["telemetry.options.tensorboard.flush", "no such option"]),
        ("telemetry.options={tensorboard:3}", ["telemetry.options.tensorboard = 3", "allowed is"]),
    ],
)
def test_a_wrong_setting_is_one_line(folder: Path, given: str, parts: list[str]) -> None:
    line = refusal(given)
    assert [part for part in parts if part not in line] == [], line


def test_an_option_of_a_tracker_that_is_off_is_told(folder: Path) -> None:
    given = settings("telemetry.options.wandb.project=mine", "telemetry.options.tensorboard={}").telemetry
    (note,) = registry.unused_notes(given)
    assert note.startswith("telemetry.options.wandb.project = mine: telemetry.trackers=")
    assert note.endswith("has no wandb; give telemetry.trackers=[jsonl,tensorboard,wandb], or leave it out")


def test_a_wrong_option_of_a_users_own_is_one_line(folder: Path) -> None:
    line = refusal("telemetry.trackers=['mine.py:Lines']", "telemetry.options.Lines.factor=-1")
    assert "telemetry.options.Lines.factor = -1: allowed is a number of at least 0" in line


def test_a_dry_run_looks_at_names_and_options_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans a run on a machine without the packages of the run."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for trackers, part in (("[wandb]", "model.path"), ("[wandbd]", "did you mean wandb?")):
        with pytest.raises(UserError) as caught:
            planned_inputs(settings(f"telemetry.trackers={trackers}", "model.path=nowhere"))
        assert part in str(caught.value)


def test_a_tracker_may_refuse_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(options: Mapping[str, Any]) -> None:
        raise UserError(f"no key, and {options}")

    monkeypatch.setattr(
        "skyrl_mega.telemetry.trackers.tensorboard.TensorboardTracker.check_ready", missing, raising=False
    )
    with pytest.raises(UserError, match=r"no key, and \{\}"):
        registry.check_ready(TelemetryConfig())
    registry.check(TelemetryConfig())


def played(tracker: Fake, steps: int = 3, until: Callable[[list[str]], bool] = lambda messages: True) -> list[str]:
    """Returns the messages of a tracker over these steps until the end of its run, which waits for `until`."""
    messages: list[str] = []
    guarded = Guarded("fake", tracker, messages.append)
    guarded.call("start", {}, None)
    for step in range(1, steps + 1):
        guarded.call("log_trajectories", step, [])
        guarded.call("log", step, {"a": 1.0})
    deadline = time.monotonic() + 60
    while not until(messages) and time.monotonic() < deadline:
        time.sleep(0.005)
    guarded.close()
    return messages


EVERY = [(name, step) for step in (1, 2, 3) for name in ("log_trajectories", "log")]


def test_a_failure_is_told_once_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded, "WAITS_S", (0.01, 0.01, 0.01))
    fake = Fake({("start", 0): 1, ("log", 2): 3, ("log", 3): 1})
    messages = played(fake, until=lambda messages: ("log", 3) in fake.calls)
    assert fake.calls == [("start", 0), *EVERY, ("close", 0)], "nothing is left out, nothing is there twice"
    assert [line for line in messages if line != "tracker fake writes to a list"] == [
        "tracker fake failed: ConnectionError: no answer from https://***@host/start at all; the run continues, "
        "the call is tried again up to 3 times, within 0.03 s; metrics.jsonl has every step"
    ]


def test_a_tracker_that_keeps_failing_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded, "WAITS_S", (0.01, 0.01, 0.01))
    fake = Fake({("log", 2): 4, ("close", 0): 1})
    messages = played(fake, until=lambda messages: len(messages) == 3)
    assert fake.calls == [("start", 0), ("log_trajectories", 1), ("log", 1), ("log_trajectories", 2)]
    assert [line.partition(":")[0] for line in messages] == [
        "tracker fake writes to a list",
        "tracker fake failed",
        "tracker fake is off for the rest of the run",
        "tracker fake failed at the end of the run",
    ]


def test_the_runs_end_shortens_the_waits() -> None:
    fake = Fake({("log", 3): 1})
    messages = played(fake)
    assert fake.calls[-2:] == [("log", 3), ("close", 0)] and len(messages) == 2


def test_a_tracker_that_hangs_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded, "CLOSE_S", 0.05)
    monkeypatch.setattr(guarded, "MAX_QUEUED", 4)
    fake = Fake()
    fake.hold.clear()
    messages = played(fake, steps=20)
    fake.faults = {("start", 0): 1}
    fake.hold.set()
    [thread.join(60) for thread in threading.enumerate() if thread.name == "tracker fake"]
    assert [line.partition(":")[0] for line in messages] == [
        "tracker fake is off for the rest of the run",
        "tracker fake has not finished within 0.05 s of the run's end and is left; it may lack steps, metrics.jsonl "
        "has every step",
    ]


def test_metrics_jsonl_does_end_the_run(tmp_path: Path) -> None:
    """Fills the disk of metrics.jsonl, the input of resuming and of the report: a full disk is a fault."""
    jsonl = JsonlTracker(tmp_path)
    fake = Fake()
    with Trackers(jsonl, [Guarded("fake", fake, print)]) as trackers:
        trackers.start(Config(), None)
        jsonl._file.close()
        jsonl._file = Path("/dev/full").open("a")  # noqa: SIM115 - the tracker closes it
        with pytest.raises(OSError, match="No space left"):
            trackers.log(1, {"a": 1.0})
        jsonl._file = jsonl.path.open("a")
    assert fake.calls == [("start", 0), ("close", 0)]
