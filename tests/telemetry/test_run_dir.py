"""A run's folder belongs to one run at a time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from skyrl_mega.config.compose import compose
from skyrl_mega.config.errors import UserError
from skyrl_mega.config.schema import CheckpointConfig, Config, RunConfig
from skyrl_mega.telemetry.run_dir import run_folder

HOLDER = """
import sys
from skyrl_mega.config.schema import Config, RunConfig
from skyrl_mega.telemetry.run_dir import run_folder
with run_folder(Config(run=RunConfig(name="r", directory=sys.argv[1]))):
    print("held", flush=True)
    sys.stdin.read()
"""


def config(directory: Path, resume: bool = True) -> Config:
    return Config(run=RunConfig(name="r", directory=str(directory)), checkpoint=CheckpointConfig(resume=resume))


def test_it_holds_the_settings(tmp_path: Path) -> None:
    with run_folder(config(tmp_path)) as folder:
        assert folder == tmp_path / "r"
        assert compose(folder / "config.yaml") == config(tmp_path)
        assert (folder / "logs").is_dir()


def test_a_second_run_is_refused_and_a_killed_one_leaves_nothing_locked(tmp_path: Path) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], env=os.environ, **pipes)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with (
            pytest.raises(UserError, match=rf"run.name = r: another run \(process {holder.pid}\) is at work"),
            run_folder(config(tmp_path)),
        ):
            pass
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate(timeout=30)
    with run_folder(config(tmp_path)):
        pass


def test_checkpoints_are_neither_overwritten_nor_taken_up_unasked(tmp_path: Path) -> None:
    (tmp_path / "r" / "checkpoints" / "step_000010").mkdir(parents=True)
    with (
        pytest.raises(UserError, match=r"checkpoint.resume = false: .* holds checkpoints up to step_000010"),
        run_folder(config(tmp_path, resume=False)),
    ):
        pass
    with run_folder(config(tmp_path)):
        pass


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(UserError, match=r"run.directory = .*file: .* cannot be made"),
        run_folder(config(tmp_path / "file")),
    ):
        pass
