"""A plain user's view of a running command: hidden processes, and processes that cannot be inspected yet or anymore."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyrl_mega.envs.sandbox import run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is Linux's")
SYSTEM = "/usr/bin/python3"
USER = 65534
LOOKS = """
import json, os, subprocess, sys, time
import watch

program, command, seconds, count, pause = *sys.argv[1:3], *map(float, sys.argv[3:])
watch.HIDDEN_S = seconds
child = subprocess.Popen([program, "-c", command])
looking = watch.Watch("held", 2**20, 100, 2**20, 0, memory=False)
found = []
for _ in range(int(count)):
    time.sleep(pause)
    found.append(looking.look()[0])
child.kill()
print(json.dumps(found))
"""
"""A plain user's program to inspect a command started by the program itself."""


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yields a folder with the watch, readable by every user; pytest's folders are closed to other users."""
    path = Path(tempfile.mkdtemp())
    for name in ("watch.py", "tree.py"):
        shutil.copy(Path(run.__file__).with_name(name), path / name)
    (path / "looks.py").write_text(LOOKS)
    (path / "held").mkdir()
    subprocess.run(["chmod", "-R", "a+rX", path], check=True)
    yield path
    shutil.rmtree(path)


def looks(folder: Path, program: str, command: str, hidden_s: float, count: int, pause: float) -> list[str | None]:
    """Returns the results of `count` inspections of a command, tolerating hidden processes for `hidden_s` seconds."""
    if not Path(SYSTEM).exists():
        pytest.skip(f"no {SYSTEM}, which every user may run")
    user = USER if os.geteuid() == 0 else None
    arguments = [SYSTEM, "looks.py", program, command, str(hidden_s), str(count), str(pause)]
    completed = subprocess.run(arguments, cwd=folder, capture_output=True, text=True, timeout=60, user=user, group=user)
    assert completed.returncode == 0, completed.stderr
    reports: list[str | None] = json.loads(completed.stdout)
    return reports


def test_one_that_waits_to_be_reaped_hides_nothing(folder: Path) -> None:
    assert looks(folder, SYSTEM, "pass", 1.0, 8, 0.2) == [None] * 8


def test_many_short_ones_hide_nothing(folder: Path) -> None:
    """Runs many short processes: an ending process may refuse inspection before its end."""
    loop = "while true; do echo a | cat | cat >/dev/null; done"
    assert looks(folder, "/bin/sh", loop, 0.3, 300, 0.01) == [None] * 300


def test_one_that_hides_is_found(folder: Path) -> None:
    hide = "import ctypes, time; ctypes.CDLL(None).prctl(4, 0, 0, 0, 0); time.sleep(9)"
    reports = looks(folder, SYSTEM, hide, 0.5, 8, 0.2)
    assert (reports[0], reports[-1]) == (None, "disk")
