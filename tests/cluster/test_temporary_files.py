"""Temporary files with the lifetime of a block, and the clean-up after a killed process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from skyrl_mega.cluster.channel import Channel
from skyrl_mega.cluster.temporary_files import partial_file, remove_stale, temporary_folder
from skyrl_mega.data.write import write_rows

KILLED = """
import os, signal, sys
from pathlib import Path
from skyrl_mega.cluster.temporary_files import partial_file, temporary_folder
place = Path(sys.argv[1])
with temporary_folder(place, "kind-") as folder, partial_file(place / "rows.parquet") as part:
    (folder / "sub").mkdir()
    part.write_text("half")
    print("made", flush=True)
    sys.stdin.read()
"""


def test_the_next_one_clears_away_after_those_who_were_killed_and_no_others(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    dead, alive = (subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(2))
    for process in (dead, alive):
        assert process.stdout is not None and process.stdout.readline() == b"made\n"
    before_names = set(tmp_path.iterdir())
    assert len(before_names) == 4
    dead.send_signal(signal.SIGKILL)
    dead.wait()
    (tmp_path / "kind-ofthekind").mkdir()  # a foreign folder: the name has another form
    with temporary_folder(tmp_path, "kind-") as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        assert len(list(tmp_path.glob("kind-*"))) == 3  # the new, the living process's, the foreign
    write_rows([{"a": 1}], tmp_path / "rows.parquet")
    assert len(set(tmp_path.iterdir()) & before_names) == 2
    assert alive.stdin is not None
    alive.communicate()
    assert alive.returncode == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["kind-ofthekind", "rows.parquet"]


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    kept, place = tmp_path / "kept", tmp_path / "place"
    kept.mkdir()
    place.mkdir()
    (place / "kind-01234567").symlink_to(kept)
    remove_stale(place, "kind-")
    assert kept.is_dir() and (place / "kind-01234567").is_symlink()


def test_what_is_renamed_stays_and_what_fails_does_not(tmp_path: Path) -> None:
    with partial_file(tmp_path / "a") as part:
        part.write_text("whole")
        os.replace(part, tmp_path / "a")
    with pytest.raises(ZeroDivisionError), partial_file(tmp_path / "b"):
        raise ZeroDivisionError
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_channel_knows_what_is_left() -> None:
    channel = Channel()
    for sign, name in (("+", "/a"), ("+", "/b c\n"), ("-", "/a"), ("+", "/d"), ("+", "/a"), ("-", "/d")):
        channel.record_path(sign, Path(name))
    assert channel.unremoved_paths() == [Path("/b c\n"), Path("/a")]
