"""Files of a container: what is written is read again, and hostile listings and archives are refused."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from skyrl_mega.envs.containers import files
from skyrl_mega.envs.containers.runtime import CommandOutput
from skyrl_mega.envs.swe.session import File, UnfitError
from tests.envs.swe.folder_runtime import FolderContainer

PLACE = "/testbed"


@pytest.fixture
def container(tmp_path: Path) -> Iterator[FolderContainer]:
    (tmp_path / "testbed").mkdir()
    container = FolderContainer(tmp_path)
    yield container
    container.remove(1)


def everything(container: FolderContainer) -> dict[str, File]:
    return files.read(container, PLACE, files.listing(container, PLACE, 60), 60, 2**20)


def test_files_that_are_written_are_read_again(container: FolderContainer) -> None:
    written = {
        "a.py": File(b"1\n"),
        "deep/er/b": File(b"", 0o755),
        "-rf": File(b"2"),
        "with space\nand line": File(b"3"),
        "*": File(b"4"),
        "ü\udcff": File(b"5"),
        f"{'long/' * 40}name": File(bytes(1000)),
        "link": File(b"/etc/../x\ny", 0o777, link=True),
        "dangling/link": File(b"../absent", 0o777, link=True),
    }
    files.write(container, PLACE, written, 60)
    assert {name: (f.data, f.link) for name, f in everything(container).items()} == {
        name: (f.data, f.link) for name, f in written.items()
    }
    assert everything(container)["deep/er/b"].mode == 0o755
    files.write(container, PLACE, {"deep": File(b"now a file"), "a.py": None, "-rf": None, "*": None}, 60)
    left = everything(container)
    assert left["deep"].data == b"now a file" and left.keys().isdisjoint({"a.py", "-rf", "*", "deep/er/b"})
    assert "with space\nand line" in left


def test_nothing_is_written_or_removed_through_a_link(container: FolderContainer, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    for name in ("tests", "docs"):
        (container.root / "testbed" / name).symlink_to(outside)
    files.write(container, PLACE, {"tests/kept": File(b"new"), "tests/deep/x": File(b"y"), "docs/kept": None}, 60)
    assert (outside / "kept").read_text() == "kept" and sorted(os.listdir(outside)) == ["kept"]
    assert everything(container)["tests/kept"].data == b"new"
    assert (container.root / "testbed" / "docs").is_symlink()


@pytest.mark.parametrize(
    "wrong", [{"a": File(b"/", link=True), "a/b": File(b"")}, {"../a": File(b"")}, {"/a": File(b"")}, {"a//b": None}]
)
def test_files_in_impossible_places_are_refused(container: FolderContainer, wrong: Any) -> None:
    with pytest.raises(UnfitError):
        files.write(container, PLACE, wrong, 60)


def test_every_change_of_a_file_is_seen(container: FolderContainer) -> None:
    top = container.root / "testbed"
    for name in ("same", "content", "mode", "time", "gone"):
        (top / name).write_text("12345")
    before = files.listing(container, PLACE, 60)
    stamp = (top / "content").stat()
    (top / "content").write_text("54321")
    os.utime(top / "content", ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # the policy forges the time
    (top / "mode").chmod(0o755)
    (top / "gone").unlink()
    (top / ".git").mkdir()
    (top / ".git" / "HEAD").write_text("x")
    (top / "__pycache__").mkdir()
    (top / "__pycache__" / "x.pyc").write_text("x")
    os.mkfifo(top / "pipe")
    after = files.listing(container, PLACE, 60)
    assert {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)} == {
        "content", "mode", "gone"
    }  # fmt: skip


class Forged:
    """A container whose programs are the policy's: it prints what the test says."""

    def __init__(self, *outputs: CommandOutput) -> None:
        self.outputs = list(outputs)

    def run(self, argv: Sequence[str], timeout_s: float, **_: Any) -> CommandOutput:
        return self.outputs.pop(0)


def ok(data: bytes) -> CommandOutput:
    return CommandOutput("ok", 0, data, b"")


def entry(path: bytes, kind: bytes = b"f", mode: bytes = b"644", size: bytes = b"1") -> bytes:
    return b"\0".join((path, kind, mode, size, b"1.5", b"x" if kind == b"l" else b"")) + b"\0"


@pytest.mark.parametrize(
    "listing",
    [
        b"a",
        b"a\0f\0",
        entry(b"../a"),
        entry(b"/etc/passwd"),
        entry(b""),
        entry(b"a", kind=b"p"),
        entry(b"a", mode=b"99999"),
        entry(b"a", size=b"-1"),
        entry(b"a", size=b"9" * 5000),
    ],
)
def test_a_forged_listing_is_refused(listing: bytes) -> None:
    with pytest.raises(UnfitError):
        files.listing(Forged(ok(listing)), PLACE, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("status", ["timeout", "output", "failed"])
def test_a_program_that_does_not_end_well_is_the_policys_fault(status: str) -> None:
    with pytest.raises(UnfitError):
        files.listing(Forged(CommandOutput(status, None, b"", b"\xff no")), PLACE, 1)  # type: ignore[arg-type]


def archive(**changes: Any) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.GNU_FORMAT) as tar:
        info = tarfile.TarInfo("./a")
        data = changes.pop("data", b"1")
        info.size = len(data)
        for name, value in changes.items():
            setattr(info, name, value)
        tar.addfile(info, io.BytesIO(data) if info.isreg() else None)
    return stream.getvalue()


PAX = io.BytesIO()
with tarfile.open(fileobj=PAX, mode="w", format=tarfile.PAX_FORMAT) as _tar:
    _tar.addfile(tarfile.TarInfo("./" + "ü" * 200))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 10240,
        b"x" * 600,
        archive(name="./b"),
        archive(name="/a"),
        archive(type=tarfile.SYMTYPE, linkname="/etc/passwd"),
        archive(type=tarfile.LNKTYPE, linkname="/etc/passwd"),
        archive(type=tarfile.CHRTYPE),
        archive(type=tarfile.FIFOTYPE),
        archive(type=tarfile.DIRTYPE),
        archive(type=tarfile.GNUTYPE_SPARSE),
        PAX.getvalue(),
        archive()[:512],
        archive(data=bytes(4096))[:1500],
        archive().replace(b"00000000001\0", b"77777777777\0"),
        archive().replace(b"00000000001\0", b"\x80" + b"\xff" * 11),
        archive(name="./" + "x" * 300)[:1024] * 20000,  # a chain of long names
    ],
)
def test_a_forged_archive_is_refused(data: bytes) -> None:
    listed = files.listing(Forged(ok(entry(b"a"))), PLACE, 1)  # type: ignore[arg-type]
    with pytest.raises(UnfitError):
        files.read(Forged(ok(data)), PLACE, listed, 1, 2**20)  # type: ignore[arg-type]


def test_files_beyond_the_limit_are_not_read(container: FolderContainer) -> None:
    with open(container.root / "testbed" / "sparse", "wb") as file:
        file.truncate(2**40)
    with pytest.raises(UnfitError, match="more than 1 MiB"):
        everything(container)
    honest = files.listing(container, PLACE, 60)
    lying = {name: files.Entry(e.mode, 1, e.changed, e.link) for name, e in honest.items()}
    (container.root / "testbed" / "sparse").unlink()
    (container.root / "testbed" / "sparse").write_bytes(bytes(2**22))
    with pytest.raises(UnfitError, match="too large"):
        files.read(container, PLACE, lying, 60, 2**20)


def test_a_listed_file_that_vanished_is_refused(container: FolderContainer) -> None:
    (container.root / "testbed" / "a").write_text("1")
    listed = files.listing(container, PLACE, 60)
    (container.root / "testbed" / "a").unlink()
    with pytest.raises(UnfitError):
        files.read(container, PLACE, listed, 60, 2**20)
