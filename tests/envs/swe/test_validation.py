"""Validation of tasks on a machine with faults."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from skyrl_mega.data.__main__ import main
from skyrl_mega.envs.faults import InfrastructureFault
from skyrl_mega.envs.swe import validation
from skyrl_mega.envs.swe.validation import TaskFinding, TaskState
from tests.envs.swe.toys import write_toys

Faults = dict[str, list[Exception]]


def validate(folder: Path, monkeypatch: pytest.MonkeyPatch, faults: Faults, *more: str) -> int:
    """Runs the command on the tasks `count` and `last`, of which each attempt raises the next of its faults."""

    def judged(options: Any, task: Any, sessions: Any) -> TaskFinding:
        if faults.get(task.path.name):
            raise faults[task.path.name].pop(0)
        return TaskFinding(TaskState.VALID)

    monkeypatch.setattr(validation, "_judged", judged)
    monkeypatch.setattr(validation, "wrong_task", lambda task, options: None)
    monkeypatch.setattr(validation.SweEnv, "check_ready", lambda options: None)
    write_toys(folder, ["count", "last"])
    words = ["swe", "--output", str(folder / "out"), "--source", str(folder / "tasks"), "--validate", "local"]
    monkeypatch.setattr(sys, "argv", ["data", *words, *more])
    return main()


def rows(folder: Path) -> list[str]:
    return [row["extra_info"]["task"] for row in pq.read_table(folder / "out" / "train.parquet").to_pylist()]


def test_a_task_with_a_fault_is_tried_again_after_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert validate(tmp_path, monkeypatch, {"count": [InfrastructureFault("no registry")]}) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith(("count:", "last:", "2 of"))]
    assert said == [
        "count: could not be checked: no registry",
        "last: valid",
        "count: valid",
        "2 of 2 tasks are valid",
    ]
    assert rows(tmp_path) == ["count", "last"]


@pytest.mark.parametrize("fault", [InfrastructureFault("no registry"), TimeoutError("raise --test-timeout")])
def test_a_task_that_cannot_be_checked_is_no_wrong_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fault: Exception
) -> None:
    assert validate(tmp_path, monkeypatch, {"last": [fault] * 2}) == 1
    said = capsys.readouterr().err
    assert "1 of 2 tasks are valid; 1 could not be checked" in said
    assert f"fault: 1 of 2 tasks could not be checked, and no rows are written; the first task is last: {fault}" in said
    assert not (tmp_path / "out" / "train.parquet").exists()
    assert validate(tmp_path / "b", monkeypatch, {"last": [fault] * 2}, "--allow-unchecked") == 0
    assert rows(tmp_path / "b") == ["count"]


def test_a_task_is_reported_when_it_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    last_is_said = threading.Event()

    class Said(TaskFinding):
        def __str__(self) -> str:
            last_is_said.set()
            return super().__str__()

    def finding(options: Any, task: Any) -> TaskFinding:
        if task.path.name == "last":
            return Said(TaskState.VALID)
        return TaskFinding(
            TaskState.VALID if last_is_said.wait(20) else TaskState.WRONG, "the other task was not reported"
        )

    monkeypatch.setattr(validation, "_finding", finding)
    assert validate(tmp_path, monkeypatch, {}, "--jobs", "2") == 0
    assert "2 of 2 tasks are valid" in capsys.readouterr().err
