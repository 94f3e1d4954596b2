"""The folder of a run, locked for a single run at a time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.compose import compose, dump
from skyrl_mega.config.schema import CheckpointConfig, Config, RunConfig
from skyrl_mega.telemetry.run_dir import run_folder
from skyrl_mega.telemetry.trackers.jsonl import JsonlTracker

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
            pytest.raises(UserError, match=rf"run.name = r: another run \(process {holder.pid}\) is using"),
            run_folder(config(tmp_path)),
        ):
            pass
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate(timeout=120)
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


def test_results_without_a_checkpoint_are_moved_and_not_mixed(tmp_path: Path) -> None:
    messages: list[str] = []
    run = tmp_path / "r"
    for attempt in (1, 2, 3):
        with run_folder(config(tmp_path), messages.append) as folder:
            assert not list(folder.glob("trajectories/*")) and not (folder / "metrics.jsonl").exists()
            with closing(JsonlTracker(folder)) as tracker:
                tracker.start({}, None)
                tracker.log(attempt, {"reward": 1.0})
            (folder / "trajectories").mkdir(exist_ok=True)
            (folder / "trajectories" / f"step_{attempt:06d}.parquet").touch()
            (folder / "notes.md").write_text("mine")
            (folder / "logs" / "run.log").write_text(f"attempt {attempt}")
    for attempt in (1, 2):
        earlier = run / "earlier" / str(attempt)
        assert json.loads((earlier / "metrics.jsonl").read_text())["step"] == attempt
        assert [p.name for p in (earlier / "trajectories").iterdir()] == [f"step_{attempt:06d}.parquet"]
        assert (earlier / "logs" / "run.log").read_text() == f"attempt {attempt}" and (
            earlier / "config.yaml"
        ).is_file()
    assert (run / "notes.md").read_text() == "mine" and len(messages) == 2 and "earlier/2" in messages[1]
    (run / "checkpoints" / "step_000003").mkdir(parents=True)
    with run_folder(config(tmp_path), messages.append) as folder:
        assert (folder / "metrics.jsonl").exists() and len(messages) == 2, "a run that is resumed goes on in its files"


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(UserError, match=r"run.directory = .*file: .* cannot be made"),
        run_folder(config(tmp_path / "file")),
    ):
        pass


def test_a_file_that_a_person_wrote_stays(tmp_path: Path) -> None:
    file = tmp_path / "r" / "config.yaml"
    file.parent.mkdir()
    for text in ("run: {name: r}  # mine\n", "", "- x\n", "&a [*a]\n", f"# Written by a run\n{dump(Config())}"):
        file.write_text(text)
        with (
            pytest.raises(UserError, match=r"run.name = r: .*config.yaml was written or edited by hand"),
            run_folder(config(tmp_path)),
        ):
            pass
        assert file.read_text() == text


def test_a_run_writes_over_its_own(tmp_path: Path) -> None:
    file = tmp_path / "r" / "config.yaml"
    for _ in range(2):
        with run_folder(config(tmp_path)):
            assert compose(file) == config(tmp_path)
    file.write_text(file.read_text().replace("seed: 0", "seed: 1"))
    with pytest.raises(UserError, match="edited by hand"), run_folder(config(tmp_path)):
        pass


def test_a_link_in_place_of_the_settings_stays(tmp_path: Path) -> None:
    with run_folder(config(tmp_path)) as folder:
        pass
    file, elsewhere = folder / "config.yaml", tmp_path / "elsewhere"
    file.rename(elsewhere)
    written = elsewhere.read_bytes()
    for target in (elsewhere, tmp_path / "nothing", folder):
        file.symlink_to(target)
        with pytest.raises(UserError, match=r"config.yaml was .* or is a link"), run_folder(config(tmp_path)):
            pass
        assert file.is_symlink()
        file.unlink()
    (folder / "config.yaml.partial").symlink_to(elsewhere)
    with run_folder(config(tmp_path)):
        assert not file.is_symlink()
    assert elsewhere.read_bytes() == written


@pytest.mark.parametrize("name", ["config.yaml", "config.yaml.partial", ".lock", "logs/run.log", "logs"])
def test_what_should_be_a_file_is_something_else(tmp_path: Path, name: str) -> None:
    place = tmp_path / "r" / name
    place.parent.mkdir(parents=True)
    if name == "logs":
        place.touch()
    else:
        place.mkdir()
    wrong = rf"^run\.\w+ = .*{name}.*(cannot be|by hand)"
    with pytest.raises(UserError, match=wrong) as caught, run_folder(config(tmp_path)):
        pass
    assert "end that one" not in str(caught.value), "no other run is there"


def test_checkpoints_that_are_no_folder(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "checkpoints").touch()
    with pytest.raises(UserError, match="checkpoints cannot be made: Not a directory"), run_folder(config(tmp_path)):
        pass
