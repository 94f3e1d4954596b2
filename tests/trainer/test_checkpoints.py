"""Checkpoints on disk are complete or ignored."""

from __future__ import annotations

import ast
import pickle
import shutil
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

import skyrl_mega
from skyrl_mega.common.errors import UserError
from skyrl_mega.hf_checkpoint.box_files import MASTER, LocalBox, file_name, read_entries, write_boxes
from skyrl_mega.hf_checkpoint.box_header import Damaged, Header, SavedFile, read_header, write_header
from skyrl_mega.parallel.box import Box
from skyrl_mega.trainer.checkpoints import (
    Checkpoints,
    DiskFull,
    check_saved_together,
    newest_intact,
    refuse_unusable,
)
from skyrl_mega.trainer.run import Run


class Usage(NamedTuple):
    """The result of `shutil.disk_usage`."""

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
    checkpoints.save(2, {"step": 2}, {"policy": write})  # removes the remains of the broken save
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000001", "step_000002"]


def test_a_damaged_one_is_named_and_an_older_one_taken(tmp_path: Path) -> None:
    lines: list[str] = []
    checkpoints = Checkpoints(tmp_path, keep=3, say=lines.append)
    for step in (1, 2, 3):
        checkpoints.save(step, {"step": step}, {"policy": write})
    (tmp_path / "step_000003" / "policy" / "weights").write_text("")
    (tmp_path / "step_000002" / "policy" / "weights").unlink()
    newest = checkpoints.newest()
    assert newest is not None and newest.name == "step_000001"
    assert lines == [
        f"{tmp_path}/step_000003 is damaged and skipped: policy/weights has 0 of 1 bytes",
        f"{tmp_path}/step_000002 is damaged and skipped: policy/weights is missing",
    ]
    (tmp_path / "step_000001" / "state.json").write_text("{")
    with pytest.raises(
        UserError, match=r"all checkpoints here .3. are damaged .* remove the folder to start from the first step"
    ):
        checkpoints.newest()


def boxes(step: int) -> Any:
    """Returns a writer of two ranks' files with the same lengths at every step."""

    def save(folder: Path) -> None:
        files = {}
        for rank in range(2):
            part = LocalBox(f"w{rank}", Box((0,), (1000,)), MASTER, torch.full((1000,), float(10 * step + rank)))
            files[file_name(rank)] = write_boxes(folder / file_name(rank), [part])
        write_header(folder, Header("float32", step, {}, {}, {f"w{rank}": (1000,) for rank in range(2)}, files))

    return save


def exported(policy: Path) -> None:
    """Reads a policy as an export does before writing."""
    check_saved_together(policy)
    read_entries(policy, read_header(policy), {"w0", "w1"})


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        ("a rank's file", "policy/rank_00001.safetensors"),
        ("all ranks' files", "policy/rank_00000.safetensors"),
        ("a model's folder", "policy/checkpoint.json"),
        ("a bit of what was generated", "rollouts/groups"),
        ("a digit of the state", "state.json"),
    ],
)
def test_a_file_of_another_step_is_named_and_its_checkpoint_left_out(tmp_path: Path, damage: str, named: str) -> None:
    """Swaps or damages a file of the newest checkpoint without changing lengths, and expects the one before."""
    lines: list[str] = []
    checkpoints = Checkpoints(tmp_path, keep=3, say=lines.append)
    for step in (1, 2, 3):
        groups = str(step).encode() * 100
        parts = {"policy": boxes(step), "rollouts": lambda folder, g=groups: (folder / "groups").write_bytes(g)}
        checkpoints.save(step, {"step": step, "place": 71 + step}, parts)
    old, new = tmp_path / "step_000001", tmp_path / "step_000003"
    match damage:
        case "a rank's file":
            shutil.copy(old / "policy" / file_name(1), new / "policy")
        case "all ranks' files":
            for rank in range(2):
                shutil.copy(old / "policy" / file_name(rank), new / "policy")
        case "a model's folder":
            shutil.rmtree(new / "policy")
            shutil.copytree(old / "policy", new / "policy")
        case "a bit of what was generated":
            (new / "rollouts" / "groups").write_bytes(b"3" * 99 + b"2")
        case "a digit of the state":
            (new / "state.json").write_text((new / "state.json").read_text().replace("74", "75"))
    newest = checkpoints.newest()
    assert newest is not None and newest.name == "step_000002"
    assert len(lines) == 1 and f"{new} is damaged and skipped: " in lines[0] and named in lines[0]
    assert newest_intact(tmp_path) == newest
    if "state" not in damage and "generated" not in damage:
        with pytest.raises(Damaged, match=named):
            exported(new / "policy")


def test_one_whose_tensors_are_damaged_is_left_out_once_the_ranks_say_so(tmp_path: Path) -> None:
    lines: list[str] = []
    checkpoints = Checkpoints(tmp_path, keep=3, say=lines.append)
    for step in (1, 2):
        checkpoints.save(step, {"step": step}, {"policy": write})
    newest = checkpoints.newest()
    assert newest is not None
    checkpoints.mark_damaged(newest, Damaged("rank_00000.safetensors: w[0:9].master: its CRC-32 is 0"))
    older = checkpoints.newest()
    assert older is not None and older.name == "step_000001" and "w[0:9].master" in lines[0]


def test_a_run_goes_on_from_the_one_before_the_one_that_ranks_found_damaged(tmp_path: Path) -> None:
    checkpoints, read = Checkpoints(tmp_path, keep=3), list[str]()
    for step in (1, 2):
        checkpoints.save(step, {"step": step}, {"policy": write})

    def restore(checkpoint: Path) -> None:
        read.append(checkpoint.name)
        if checkpoint.name == "step_000002":
            raise Damaged("rank_00000.safetensors: w[0:9].master: its CRC-32 is 0")

    config = SimpleNamespace(checkpoint=SimpleNamespace(resume=True))
    run: Any = SimpleNamespace(checkpoints=checkpoints, config=config, _restore=restore)
    assert Run.restore(run) and read == ["step_000002", "step_000001"]


def test_without_room_nothing_is_written_and_the_old_one_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, {"step": 1}, {"policy": lambda folder: (folder / "weights").write_bytes(bytes(5_000_000))})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, 4_000_000))
    with pytest.raises(DiskFull, match=r"a checkpoint needs about 0.005 GB, and .* has 0.004 GB free"):
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
    for newest in (checkpoints.newest(), newest_intact(tmp_path)):
        assert newest is not None and newest.name == "step_1000000"
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["step_000100", "step_1000000", *copies])


def test_files_of_a_user_in_a_checkpoint_keep_it(tmp_path: Path) -> None:
    lines: list[str] = []
    checkpoints = Checkpoints(tmp_path, keep=1, say=lines.append)
    checkpoints.save(1, {"step": 1}, {"policy": write})
    export = tmp_path / "step_000001" / "hf" / "model.safetensors"
    export.parent.mkdir()
    export.write_text("mine")
    for step in (2, 3):
        checkpoints.save(step, {"step": step}, {"policy": write})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000001", "step_000003"] and export.read_text() == "mine"
    assert lines == [
        f"the old checkpoint {tmp_path}/step_000001 is not removed, as the run did not write {export}; move this file "
        "elsewhere"
    ]
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
    with pytest.raises(UserError, match=r"step_000001/policy: is a distributed checkpoint .* model\.path") as raised:
        checkpoints.newest()
    assert "\n" not in str(raised.value)


class Evil:
    """An object that writes a file when unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


def test_looking_for_the_newest_runs_no_code_from_it(tmp_path: Path) -> None:
    """Looks for the newest checkpoint among pickle files, including torch's files of earlier versions; no code may
    run."""
    mark = tmp_path / "was here"
    evil = pickle.dumps(Evil(mark))
    pickle.loads(evil)
    assert mark.exists()
    mark.unlink()
    file = "rank_00000.safetensors"
    header = Header("float32", 3, {}, {}, {"w": (2,)}, {file: SavedFile(len(evil), zlib.crc32(evil))})

    def save(folder: Path) -> None:
        for name in (".metadata", "common.pt", file):
            (folder / name).write_bytes(evil)
        write_header(folder, header)

    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    checkpoints.save(3, {"step": 3}, {"policy": save})
    with pytest.raises(UserError, match=r"all checkpoints here .1. are damaged .*rank_00000\.safetensors"):
        checkpoints.newest()
    folder = tmp_path / "checkpoints" / "step_000003"
    assert checkpoints.state(folder) == {"step": 3}
    with pytest.raises(UserError, match=r"rank_00000\.safetensors"):
        read_entries(folder / "policy", read_header(folder / "policy"), {"w"})
    (folder / "policy" / "checkpoint.json").unlink()
    with pytest.raises(UserError, match=r"distributed checkpoint of torch"):
        checkpoints.newest()
    assert not mark.exists()


def test_nothing_in_the_package_can_unpickle_a_file() -> None:
    """Searches the package for every known way of unpickling."""
    ways = {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "torch.distributed.checkpoint"}
    uses = []
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
                    uses.append(f"{file.name}: {call}")
            else:
                continue
            uses += [f"{file.name}: {name}" for name in names & ways]
    assert uses == []
