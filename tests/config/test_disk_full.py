"""A full disk: every write of a run raises a fault with the file's name."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl_mega.cluster.temporary_files import partial_file
from skyrl_mega.config.command import FAULT, guarded
from skyrl_mega.hf_checkpoint import box_files
from skyrl_mega.hf_checkpoint.box_files import MASTER, LocalBox, write_boxes
from skyrl_mega.parallel.box import Box
from skyrl_mega.telemetry.console import Console
from skyrl_mega.telemetry.trackers.jsonl import JsonlTracker

FULL = Path("/dev/full")


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def metrics(file: Path) -> None:
    file.symlink_to(FULL)
    JsonlTracker(file.parent).log(1, {"loss": 1.0})


def log(file: Path) -> None:
    file.symlink_to(FULL)
    with Console() as console:
        console.log_to(file)
        console.say("a line")


def weights(file: Path) -> None:
    write_boxes(file, [LocalBox("w", Box((0,), (4,)), MASTER, torch.zeros(4))])


def whole_file(file: Path) -> None:
    with partial_file(file) as partial, FULL.open("w") as opened:
        assert partial.exists()
        opened.write("text")


@pytest.mark.parametrize(
    ("write", "name"),
    [(metrics, "metrics.jsonl"), (log, "run.log"), (weights, "rank_00000.safetensors"), (whole_file, "report.html")],
)
def test_a_full_disk_is_a_fault_that_names_the_file(
    write: Callable[[Path], None],
    name: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(box_files, "_pwrite", full)

    def run() -> int:
        write(tmp_path / name)
        return 0

    assert guarded(run) == FAULT
    assert capsys.readouterr().err == f"fault: [Errno 28] No space left on device: '{tmp_path / name}'\n"
