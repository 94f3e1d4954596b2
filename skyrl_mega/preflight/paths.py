"""Shared folders: every node sees them, may write to them, and sees what the others write; and there is room."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from skyrl_mega.preflight.finding import Finding, gib, main_group

SCRATCH_BYTES = 5 << 30
"""Free bytes that a node's own /tmp should have: Ray's session and compiled kernels."""
SHM_BYTES = 1 << 30
"""… and /dev/shm: messages between processes."""

SETTLE_S = 5.0
"""What a network file system may take to show one node's new file to another."""


@dataclass(frozen=True)
class PathFacts:
    """What a node says of folders."""

    errors: tuple[str, ...]
    """Folders that it does not see or may not write to."""
    free_bytes: int | None
    """Of the run's folder."""
    local_free: Mapping[str, int]
    """Free bytes of the node's own places, by path."""


def gather(run: Path, token: str, name: str) -> PathFacts:
    """Looks at the folders and leaves the file `.preflight-<token>.<name>`, which holds `name`, in the run's.

    Args:
        run: the run's folder, which exists.
        token: the same for all nodes of one preflight.
        name: this node's.
    """
    errors, free = [], None
    try:
        free = shutil.disk_usage(run).free
        with _mark(run, token, name).open("x") as mark:
            mark.write(name)
            mark.flush()
            os.fsync(mark.fileno())
    except OSError as error:
        errors.append(f"{run}: {error.strerror or error}")
    places = [Path(p) for p in ("/tmp", "/dev/shm")]
    return PathFacts(tuple(errors), free, {str(p): shutil.disk_usage(p).free for p in places if p.is_dir()})


def unseen(run: Path, token: str, names: Sequence[str], wait_s: float = SETTLE_S) -> list[str]:
    """Names of nodes whose file this one does not see, or sees with another content, `wait_s` after the first look."""
    until = time.monotonic() + wait_s
    while missing := [name for name in names if not _seen(run, token, name)]:
        if time.monotonic() > until:
            break
        time.sleep(0.2)
    return missing


def _seen(run: Path, token: str, name: str) -> bool:
    try:
        return _mark(run, token, name).read_text() == name
    except OSError:
        return False


def remove(run: Path, token: str) -> None:
    """Takes the files away."""
    for file in run.glob(f".preflight-{token}.*"):
        file.unlink(missing_ok=True)


def _mark(run: Path, token: str, name: str) -> Path:
    return run / f".preflight-{token}.{name}"


def check_shared(facts: Mapping[str, PathFacts], blind: Mapping[str, Sequence[str]], run: Path) -> list[Finding]:
    """Folders that are not there, not writable or not the same.

    Args:
        facts: by node.
        blind: node → the nodes whose file it did not see.
        run: the run's folder.
    """
    found = [Finding(node, "paths", "bad", text) for node, f in facts.items() for text in f.errors]
    wrote = [node for node, f in facts.items() if not f.errors]
    together = main_group(wrote, lambda a, b: b not in blind.get(a, ()))
    for node in wrote:
        if node not in together:
            others = ", ".join([n for n in wrote if n in together][:4])
            text = f"{run} is another folder than on {others}; mount the same one on all nodes"
            found.append(Finding(node, "paths", "bad", text))
    return found


def check_room(facts: Mapping[str, PathFacts], run: Path, needed: int) -> list[Finding]:
    """Disks that are too full.

    Args:
        facts: by node.
        run: the run's folder.
        needed: bytes that the run's checkpoints take, about.
    """
    found = []
    for node, f in facts.items():
        if f.free_bytes is not None and f.free_bytes < needed:
            found.append(
                Finding(
                    node,
                    "disk",
                    "bad",
                    f"{run} has {gib(f.free_bytes)}, checkpoints need about {gib(needed)}; make room, or lower "
                    "checkpoint.keep",
                )
            )
        for place, least in (("/tmp", SCRATCH_BYTES), ("/dev/shm", SHM_BYTES)):
            if f.local_free.get(place, least) < least:
                found.append(
                    Finding(node, "disk", "warn", f"{place} has {gib(f.local_free[place])}, {gib(least)} are advised")
                )
    return found
