"""metrics.jsonl and TensorBoard: written, killed and resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from skyrl_mega.common.errors import UserError
from skyrl_mega.telemetry.metrics import read
from skyrl_mega.telemetry.trackers.jsonl import JsonlTracker
from skyrl_mega.telemetry.trackers.tensorboard import TensorboardTracker


def test_one_object_a_step(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path)
    tracker.start({}, None)
    tracker.log(1, {"policy/loss": np.float32(0.5), "reward/mean": torch.tensor(0.25)})
    tracker.log(2, {"policy/loss": float("nan"), "policy/grad_norm": float("inf")})
    tracker.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line, parse_constant=lambda name: f"invalid {name}") for line in lines] == [
        {"step": 1, "policy/loss": 0.5, "reward/mean": 0.25},
        {"step": 2, "policy/loss": None, "policy/grad_norm": None},
    ]
    assert not (tmp_path / "tensorboard").exists()


def test_a_resumed_run_writes_what_an_unbroken_one_does(tmp_path: Path) -> None:
    for name, breaks in (("whole", []), ("broken", [3])):
        step = 0
        for end in [*breaks, 6]:
            tracker = JsonlTracker(tmp_path / name)
            tracker.start({}, step or None)
            for number in range(step + 1, min(end + 2, 6) + 1):  # continues past its last checkpoint, then is killed
                tracker.log(number, {"x": number / 7})
            tracker.close()
            with (tmp_path / name / "metrics.jsonl").open("a") as file:
                file.write('{"step": 9, "x"' if end in breaks else "")
            step = end
    assert (tmp_path / "whole" / "metrics.jsonl").read_text() == (tmp_path / "broken" / "metrics.jsonl").read_text()
    assert [row["step"] for row in read(tmp_path / "whole" / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]


def test_a_killed_process_loses_no_row(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys; from pathlib import Path\n"
        "from skyrl_mega.telemetry.trackers.jsonl import JsonlTracker\n"
        "t = JsonlTracker(Path(sys.argv[1])); t.start({}, None)\n"
        "t.log(1, {'x': 1.0}); os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = subprocess.run([sys.executable, "-c", program, str(tmp_path)], env=os.environ, check=False, timeout=240)
    assert ended.returncode == -signal.SIGKILL
    assert read(tmp_path / "metrics.jsonl") == [{"step": 1, "x": 1.0}]


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path: Path) -> None:
    for start, end, value in ((0, 4, 1.0), (2, 5, 2.0)):
        tracker = TensorboardTracker(tmp_path)
        tracker.start({}, start or None)
        for step in range(start + 1, end + 1):
            tracker.log(step, {"policy/loss": value * step})
        tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("policy/loss")] == [(1, 1), (2, 2), (3, 6), (4, 8), (5, 10)]


@pytest.mark.parametrize(
    "row, said",
    [
        (b'{"step": 2', "Expecting"),
        (b"\x00\xff\x80", "metrics.jsonl"),
        (b'{"step": 2, "a": NaN}', "NaN is no number"),
        (b"[" * 5000, "nests deeper"),
        (b"[1]", "it has no step"),
        (b'{"step": "2"}', "it has no step"),
        (b'{"step": -1}', "it has no step"),
        (b'{"step": 2, "a": "text"}', "a: text; allowed is a number or null"),
        (b'{"step": 2, "a": [1]}', "allowed is a number or null"),
        (b'{"step": 2, "a": true}', "allowed is a number or null"),
    ],
)
def test_a_broken_row_is_named(row: bytes, said: str, tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"step": 1, "a": 1}\n' + row + b'\n{"step": 3}\n{"ste')
    with pytest.raises(UserError, match="row 2") as caught:
        read(file)
    assert said in str(caught.value)
    tracker = JsonlTracker(tmp_path)
    tracker.start({}, 3)  # a resumed run skips invalid rows
    tracker.close()
    assert [line["step"] for line in read(file)] == [1, 3]
