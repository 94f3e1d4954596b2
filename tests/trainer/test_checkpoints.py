"""Checkpoints on disk: whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyrl_mega.trainer.checkpoints import Checkpoints


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


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, {"step": 1, "try": 1}, write)
    again = checkpoints.save(1, {"step": 1, "try": 2}, write)
    assert checkpoints.state(again)["try"] == 2
