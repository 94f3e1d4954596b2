"""Atomic output: files and folders appear whole, follow links and mount points, and never replace foreign files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from skyrl_mega.cluster.atomic_output import Occupied, atomic_file, atomic_folder, being_written
from skyrl_mega.cluster.temporary_files import temporary_folder


def fill(output: Path, text: str = "new", replaces: set[str] | None = None) -> None:
    with atomic_folder(output, "--output", lambda _, names: names == replaces, last="index.json") as part:
        (part / "sub").mkdir()
        (part / "sub" / "a").write_text(text)
        (part / "index.json").write_text(text)


def fill_while_somebody_else_does(output: Path) -> None:
    with atomic_folder(output, "--output") as part:
        (part / "a").write_text("new")
        output.mkdir(exist_ok=True)
        (output / "mine").write_text("mine")


def tree(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()}


WHOLE = {"sub/a": "new", "index.json": "new"}


@pytest.mark.parametrize("place", ["new/out", "empty", "link", "dangling", "mounted"])
def test_a_folder_is_filled_where_it_is(tmp_path: Path, place: str) -> None:
    for name in ("empty", "target", "mounted/lost+found"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "link").symlink_to("target")
    (tmp_path / "dangling").symlink_to("later")
    before = os.stat(tmp_path / place).st_ino if (tmp_path / place).exists() else None
    fill(tmp_path / place)
    assert tree(tmp_path / place) == WHOLE
    assert before in (None, os.stat(tmp_path / place).st_ino), "a mount point cannot be renamed"
    assert (tmp_path / "link").is_symlink() and (tmp_path / "dangling").is_symlink()
    assert not list(tmp_path.rglob(".*"))


def test_only_what_is_ours_is_replaced(tmp_path: Path) -> None:
    output = tmp_path / "out"
    fill(output, "old")
    with pytest.raises(Occupied, match=r"--output: it holds something else \(index\.json, sub\)"):
        fill(output)
    assert tree(output) == {"sub/a": "old", "index.json": "old"}
    fill(output, replaces={"sub", "index.json"})
    assert tree(output) == WHOLE
    (output / "thesis.txt").write_text("mine")
    with pytest.raises(Occupied):
        fill(output, "newer", replaces={"sub", "index.json"})
    assert tree(output) == {**WHOLE, "thesis.txt": "mine"}


def test_what_appears_meanwhile_stays(tmp_path: Path) -> None:
    for existing in (False, True):
        output = tmp_path / f"out{existing}"
        if existing:
            output.mkdir()
        with pytest.raises(Occupied):
            fill_while_somebody_else_does(output)
        assert tree(output) == {"mine": "mine"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["outFalse", "outTrue"]


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    fill(tmp_path / "out", "old")
    with pytest.raises(OSError, match="full"), atomic_folder(tmp_path / "out", "--output", lambda *_: True):
        raise OSError("full")
    assert tree(tmp_path / "out") == {"sub/a": "old", "index.json": "old"}


def test_a_file_replaces_only_what_is_ours_and_follows_links(tmp_path: Path) -> None:
    file, link = tmp_path / "there" / "a.txt", tmp_path / "link.txt"
    file.parent.mkdir()
    link.symlink_to(file)
    for text in ("ours 1", "ours 2"):
        with atomic_file(link, "--output", lambda f: f.read_text().startswith("ours")) as part:
            part.write_text(text)
        assert link.is_symlink() and file.read_text() == text
    file.write_text("mine")
    with pytest.raises(Occupied, match=r"--output: .*link\.txt"), atomic_file(link, "--output", lambda f: False):
        raise AssertionError("nothing is computed for a place that is refused")
    assert file.read_text() == "mine" and [p.name for p in file.parent.iterdir()] == ["a.txt"]


def test_another_process_at_work_is_seen(tmp_path: Path) -> None:
    output = tmp_path / "out"
    assert not being_written(output)
    with temporary_folder(tmp_path, ".out."):
        assert being_written(output)
    (tmp_path / ".out.00112233").mkdir()
    assert not being_written(output), "a killed one left it"
