"""Hostile programs in the sandbox: they end in time and change nothing outside."""

from __future__ import annotations

import contextlib
import json
import os
import time
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from skyrl_mega.envs.sandbox import CommandLimits, Sandbox, confinements
from skyrl_mega.envs.sandbox.run import CONFINEMENTS, GRACE_S, python
from tests.fuzz.programs import program
from tests.fuzz.target import Target

LIMITS = CommandLimits(
    wall_s=2,
    cpu_s=2,
    memory_mib=256,
    total_mib=600,
    processes=12,
    file_mib=8,
    disk_mib=16,
    open_files=64,
    output_kib=64,
)
STATUS = {"ok", "failed", "timeout", "output", "disk", "memory"}
SLACK_S = 8.0
"""Seconds allowed for starting and removing a sandbox on a busy machine."""
PLACES = ("/", "/tmp", "/var/tmp", "/dev/shm", "/root", "/run", ".")


def _program(random: Random) -> Any:
    return {
        "programs": [program(random) for _ in range(random.choice((1, 1, 1, 2)))],
        "mark": f"fuzz-{random.getrandbits(64):016x}",
        "kept": random.random() < 0.4,
        "namespaces": random.random() < 0.7,
    }


SYSTEM = "/usr/bin/python3"
"""Interpreter for runs without namespaces: another user may lack access to the tests' interpreter."""


@cache
def _boxes() -> dict[bool, tuple[Sandbox, list[str]]]:
    """Returns the sandbox and command with namespaces and, if the machine can confine programs so, without."""
    bare = ("namespaces",)
    boxes = {True: (Sandbox(LIMITS, name="fuzz"), python("main.py"))}
    if len(confinements(bare)) == len(CONFINEMENTS) and os.path.exists(SYSTEM):
        boxes[False] = (Sandbox(LIMITS, disabled=bare, name="fuzz"), [SYSTEM, "-I", "-B", "main.py"])
    return boxes


def _run(case: Any, folder: Path) -> None:
    os.chmod(folder, 0o755)
    outside = folder / "outside"
    (outside / "inner").mkdir(parents=True)
    (outside / "secret").write_text("secret")
    (outside / "secret").chmod(0o666)
    box, command = _boxes().get(case["namespaces"]) or _boxes()[True]
    given = {"outside": str(outside), "mark": case["mark"], "pid": os.getpid(), "project": os.getcwd()}
    before = _state(outside)
    workspace = box.workspace() if case["kept"] else None
    try:
        for code in case["programs"]:
            start = time.monotonic()
            outcome = box.run(
                [*command, case["mark"]], stdin=json.dumps(given), files={"main.py": code}, workspace=workspace
            )
            took = time.monotonic() - start
            assert took < LIMITS.wall_s + GRACE_S + SLACK_S, f"it took {took:.1f} s"
            assert outcome.status in STATUS, outcome.status
            # Invalid UTF-8 is shown as U+FFFD: a byte becomes three.
            assert len((outcome.stdout + outcome.stderr).encode()) <= 3 * 1024 * LIMITS.output_kib
            assert "secret" not in outcome.stdout.split(), "it read what it must not"
        if workspace is not None:
            used = workspace.used()
            assert used.bytes <= 2 * LIMITS.disk_mib * 2**20, used
    finally:
        if workspace is not None:
            workspace.close()
    assert _state(outside) == before, f"{before} → {_state(outside)}"
    assert not (leftovers := list(_marked(case["mark"]))), f"left: {leftovers}"


def _state(folder: Path) -> list[Any]:
    parts = []
    for path in (folder, *sorted(folder.rglob("*"))):
        info = path.lstat()
        text = path.read_text() if path.is_file() else None
        parts.append((path.name, info.st_mode, info.st_uid, info.st_gid, info.st_nlink, info.st_ctime_ns, text))
    return [parts, os.getpriority(os.PRIO_PROCESS, 0), sorted(os.sched_getaffinity(0))]


def _marked(mark: str) -> Any:
    """Yields all files and processes with this mark in the name."""
    for place in PLACES:
        with contextlib.suppress(OSError):
            yield from (f"{place}/{name}" for name in os.listdir(place) if mark in name)
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if mark.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                yield f"process {pid}"


def _prepare() -> None:
    _boxes()


TARGETS = {"programs": Target(_program, _run, errors=(), bound_s=60.0, share=4.0, prepare=_prepare)}
