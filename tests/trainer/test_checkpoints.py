"""Checkpoints on disk: whole or not at all."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from skyrl_mega.config.errors import UserError
from skyrl_mega.trainer.checkpoints import Checkpoints, NoRoom


class Usage(NamedTuple):
    """As `shutil.disk_usage` has it."""

    total: int
    used: int
    free: int


def write(folder: Path) -> None:
    (folder / "weights").write_text("w")


def test_newest_whole_one_is_found_and_old_ones_go(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.newest() is None
    for step in (2, 4, 10):
        checkpoints.save(step, {"step": step}, write)
    newest = checkpoints.newest()
    assert newest is not None and newest.name == "step_000010" and (newest / "policy" / "weights").exists()
    assert checkpoints.state(newest) == {"step": 10}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000004", "step_000010"]


def test_a_save_that_breaks_off_is_not_found(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(1, {"step": 1}, write)

    def broken(folder: Path) -> None:
        write(folder)
        raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space"):
        checkpoints.save(2, {"step": 2}, broken)
    newest = checkpoints.newest()
    assert newest is not None and newest.name == "step_000001"
    checkpoints.save(2, {"step": 2}, write)  # what was left is cleared away
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000001", "step_000002"]


def test_a_damaged_one_is_named_and_an_older_one_taken(tmp_path: Path) -> None:
    said: list[str] = []
    checkpoints = Checkpoints(tmp_path, keep=3, say=said.append)
    for step in (1, 2, 3):
        checkpoints.save(step, {"step": step}, write)
    (tmp_path / "step_000003" / "policy" / "weights").write_text("")
    (tmp_path / "step_000002" / "policy" / "weights").unlink()
    newest = checkpoints.newest()
    assert newest is not None and newest.name == "step_000001"
    assert said == [
        f"{tmp_path}/step_000003 is left out: policy/weights has 0 bytes of 1",
        f"{tmp_path}/step_000002 is left out: policy/weights is missing",
    ]
    (tmp_path / "step_000001" / "state.json").write_text("{")
    with pytest.raises(UserError, match=r"none of its 3 checkpoints is whole .* remove the folder to begin anew"):
        checkpoints.newest()


def test_without_room_nothing_is_written_and_the_old_one_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, {"step": 1}, lambda folder: (folder / "weights").write_bytes(bytes(5_000_000)))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, 4_000_000))
    with pytest.raises(NoRoom, match=r"it takes about 0.005 GB, and .* has 0.004 GB free"):
        checkpoints.save(2, {"step": 2}, write)
    newest = checkpoints.newest()
    assert newest is not None and newest.name == "step_000001"


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, {"step": 1, "try": 1}, write)
    again = checkpoints.save(1, {"step": 1, "try": 2}, write)
    assert checkpoints.state(again)["try"] == 2


def test_a_runs_folder_that_is_gone_is_not_made_anew(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", keep=2)
    with pytest.raises(FileNotFoundError, match="run/checkpoints"):
        checkpoints.save(1, {"step": 1}, write)
    assert not (tmp_path / "run").exists()


def test_an_earlier_versions_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(1, {"step": 1}, lambda folder: (folder / ".metadata").touch())
    with pytest.raises(UserError, match=r"step_000001/policy: is a distributed checkpoint .* model\.path") as told:
        checkpoints.newest()
    assert "\n" not in str(told.value)
