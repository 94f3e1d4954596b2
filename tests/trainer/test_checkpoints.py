"""Checkpoints on disk: whole or not at all."""

from __future__ import annotations

import ast
import pickle
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import skyrl_mega
from skyrl_mega.config.errors import UserError
from skyrl_mega.hf_checkpoint.box_files import read_entries
from skyrl_mega.hf_checkpoint.box_header import Header, read_header, write_header
from skyrl_mega.trainer.checkpoints import Checkpoints, NoRoom, newest_whole, refuse_unusable


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
        checkpoints.save(step, {"step": step}, {"policy": write})
    newest = checkpoints.newest()
    assert newest is not None and newest.name == "step_000010" and (newest / "policy" / "weights").exists()
    assert checkpoints.state(newest) == {"step": 10}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000004", "step_000010"]


def test_a_save_that_breaks_off_is_not_found(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(1, {"step": 1}, {"policy": write})

    def broken(folder: Path) -> None:
        write(folder)
        raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space"):
        checkpoints.save(2, {"step": 2}, {"policy": broken})
    newest = checkpoints.newest()
    assert newest is not None and newest.name == "step_000001"
    checkpoints.save(2, {"step": 2}, {"policy": write})  # what was left is cleared away
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000001", "step_000002"]


def test_a_damaged_one_is_named_and_an_older_one_taken(tmp_path: Path) -> None:
    said: list[str] = []
    checkpoints = Checkpoints(tmp_path, keep=3, say=said.append)
    for step in (1, 2, 3):
        checkpoints.save(step, {"step": step}, {"policy": write})
    (tmp_path / "step_000003" / "policy" / "weights").write_text("")
    (tmp_path / "step_000002" / "policy" / "weights").unlink()
    newest = checkpoints.newest()
    assert newest is not None and newest.name == "step_000001"
    assert said == [
        f"{tmp_path}/step_000003 is left out: policy/weights has 0 bytes of 1",
        f"{tmp_path}/step_000002 is left out: policy/weights is missing",
    ]
    (tmp_path / "step_000001" / "state.json").write_text("{")
    with pytest.raises(UserError, match=r"none of its 3 checkpoints is whole .* remove the folder to begin again"):
        checkpoints.newest()


def test_without_room_nothing_is_written_and_the_old_one_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, {"step": 1}, {"policy": lambda folder: (folder / "weights").write_bytes(bytes(5_000_000))})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, 4_000_000))
    with pytest.raises(NoRoom, match=r"it takes about 0.005 GB, and .* has 0.004 GB free"):
        checkpoints.save(2, {"step": 2}, {"policy": write})
    newest = checkpoints.newest()
    assert newest is not None and newest.name == "step_000001"


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, {"step": 1, "try": 1}, {"policy": write})
    again = checkpoints.save(1, {"step": 1, "try": 2}, {"policy": write})
    assert checkpoints.state(again)["try"] == 2


def test_copies_of_a_user_are_neither_resumed_from_nor_counted_nor_removed(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(50, {"step": 50}, {"policy": write})
    copies = ["step_000050_best", "step_best", "step_50", "step_0000050", "step_000050.bak", "step_٠٠٠٠٥٠", "step_999"]
    for name in copies:
        shutil.copytree(tmp_path / "step_000050", tmp_path / name)
    for step in (75, 100, 1_000_000):
        checkpoints.save(step, {"step": step}, {"policy": write})
    assert [path.name for path in checkpoints.completed()] == ["step_000100", "step_1000000"]
    for newest in (checkpoints.newest(), newest_whole(tmp_path)):
        assert newest is not None and newest.name == "step_1000000"
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["step_000100", "step_1000000", *copies])


def test_files_of_a_user_in_a_checkpoint_keep_it(tmp_path: Path) -> None:
    said: list[str] = []
    checkpoints = Checkpoints(tmp_path, keep=1, say=said.append)
    checkpoints.save(1, {"step": 1}, {"policy": write})
    export = tmp_path / "step_000001" / "hf" / "model.safetensors"
    export.parent.mkdir()
    export.write_text("mine")
    for step in (2, 3):
        checkpoints.save(step, {"step": step}, {"policy": write})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000001", "step_000003"] and export.read_text() == "mine"
    assert said == [f"{tmp_path}/step_000001 is kept: no save wrote {export}; move it elsewhere"]
    with pytest.raises(FileExistsError, match=r"model\.safetensors"):
        checkpoints.save(1, {"step": 1}, {"policy": write})
    assert export.read_text() == "mine"


@pytest.mark.parametrize("name", ["step_000002", "step_000002.partial"])
def test_a_link_in_a_checkpoints_place_is_refused_before_a_start(tmp_path: Path, name: str) -> None:
    elsewhere = tmp_path / "other disk"
    (elsewhere / "policy").mkdir(parents=True)
    folder = tmp_path / "checkpoints"
    checkpoints = Checkpoints(folder, keep=1)
    checkpoints.save(1, {"step": 1}, {"policy": write})
    (folder / name).symlink_to(elsewhere)
    with pytest.raises(UserError, match=rf"{name}: is a link.*move it elsewhere"):
        refuse_unusable(folder)
    with pytest.raises(FileExistsError, match=name):
        checkpoints.save(2, {"step": 2}, {"policy": write})
    checkpoints.save(3, {"step": 3}, {"policy": write})
    assert [path.name for path in checkpoints.completed()] == ["step_000003"]
    assert (elsewhere / "policy").is_dir() and (folder / name).is_symlink()


def test_a_runs_folder_that_is_gone_is_not_made_anew(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", keep=2)
    with pytest.raises(FileNotFoundError, match="run/checkpoints"):
        checkpoints.save(1, {"step": 1}, {"policy": write})
    assert not (tmp_path / "run").exists()


def test_an_earlier_versions_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(1, {"step": 1}, {"policy": lambda folder: (folder / ".metadata").touch()})
    with pytest.raises(UserError, match=r"step_000001/policy: is a distributed checkpoint .* model\.path") as told:
        checkpoints.newest()
    assert "\n" not in str(told.value)


class Evil:
    """Unpickled, it leaves a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


def test_looking_for_the_newest_runs_no_code_from_it(tmp_path: Path) -> None:
    """Whatever file of a checkpoint is a pickle: also one of torch's, which earlier versions read."""
    mark = tmp_path / "was here"
    evil = pickle.dumps(Evil(mark))
    pickle.loads(evil)
    assert mark.exists()
    mark.unlink()
    header = Header("float32", 3, {}, {}, {"w": (2,)}, {"rank_00000.safetensors": len(evil)})

    def save(folder: Path) -> None:
        for name in (".metadata", "common.pt", "rank_00000.safetensors"):
            (folder / name).write_bytes(evil)
        write_header(folder, header)

    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    checkpoints.save(3, {"step": 3}, {"policy": save})
    newest = checkpoints.newest()
    assert newest is not None and checkpoints.state(newest) == {"step": 3}
    with pytest.raises(UserError, match=r"rank_00000\.safetensors"):
        read_entries(newest / "policy", read_header(newest / "policy"), {"w"})
    (newest / "policy" / "checkpoint.json").unlink()
    with pytest.raises(UserError, match=r"distributed checkpoint of torch"):
        checkpoints.newest()
    assert not mark.exists()


def test_nothing_in_the_package_can_unpickle_a_file() -> None:
    """The ways that there are, so that none comes back unseen."""
    ways = {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "torch.distributed.checkpoint"}
    found = []
    for file in Path(skyrl_mega.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names = {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names = {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Call):
                call = ast.unparse(node)
                names = set()
                if call.startswith("torch.load(") or "allow_pickle=True" in call or "weights_only=False" in call:
                    found.append(f"{file.name}: {call}")
            else:
                continue
            found += [f"{file.name}: {name}" for name in names & ways]
    assert found == []
