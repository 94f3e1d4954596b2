"""Shared folders: visible and writable on every node, with the same files and enough space."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from skyrl_mega.preflight.finding import NodeProblem, gib, main_group

SCRATCH_BYTES = 5 << 30
"""Recommended free bytes in a node's /tmp: Ray's session and compiled kernels."""
SHM_BYTES = 1 << 30
"""Recommended free bytes in a node's /dev/shm: messages between processes."""

SETTLE_S = 5.0
"""Seconds after which a network file system must show a node's new file to other nodes."""


@dataclass(frozen=True)
class PathFacts:
    """Facts about a node's folders: visibility, and free space."""

    errors: tuple[str, ...]
    """Folders not visible or not writable on the node, each with the cause."""
    free_bytes: int | None
    """Free bytes of the file system of the run's folder; None if the folder is not visible."""
    local_free: Mapping[str, int]
    """Free bytes of the node's local folders by path."""


def gather(run: Path, token: str, name: str) -> PathFacts:
    """Returns facts about the folders on this node, and writes the file `.preflight-<token>.<name>` with content `name`
    in the run's folder; `remove` deletes it. A folder that is missing or not writable, or a file left by an earlier
    call with this token and name, is not raised but described in `PathFacts.errors`.

    Args:
        run: The run's folder.
        token: Identifier shared by all nodes of a preflight.
        name: Name of this node.
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
    local_folders = [Path(p) for p in ("/tmp", "/dev/shm")]
    return PathFacts(tuple(errors), free, {str(p): shutil.disk_usage(p).free for p in local_folders if p.is_dir()})


def unseen(run: Path, token: str, names: Sequence[str], wait_s: float = SETTLE_S) -> list[str]:
    """Waits until this node sees the file written by `gather` on each node; returns the nodes whose file is still
    missing after `wait_s` seconds, and [] as soon as none is missing.

    Args:
        run: The run's folder.
        token: Identifier of the preflight.
        names: Names of the nodes.
        wait_s: Time limit.
    """
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
    """Deletes the files written by `gather` on all nodes into the folder `run` in the preflight `token`. Raises OSError
    if a file cannot be deleted."""
    for file in run.glob(f".preflight-{token}.*"):
        file.unlink(missing_ok=True)


def _mark(run: Path, token: str, name: str) -> Path:
    return run / f".preflight-{token}.{name}"


def check_shared(facts: Mapping[str, PathFacts], unseen: Mapping[str, Sequence[str]], run: Path) -> list[NodeProblem]:
    """Returns findings (bad) for nodes on which the run's folder is missing, not writable or another folder; [] without
    any.

    Args:
        facts: State of the folders by node.
        unseen: For each node, the nodes whose file it does not see (`unseen`).
        run: The run's folder.
    """
    findings = [NodeProblem(node, "paths", "bad", text) for node, f in facts.items() for text in f.errors]
    writers = [node for node, f in facts.items() if not f.errors]
    connected = main_group(writers, lambda a, b: b not in unseen.get(a, ()))
    for node in writers:
        if node not in connected:
            others = ", ".join([n for n in writers if n in connected][:4])
            text = f"{run} is not the folder that {others} see; mount the same file system on all nodes"
            findings.append(NodeProblem(node, "paths", "bad", text))
    return findings


def check_room(facts: Mapping[str, PathFacts], run: Path, needed: int) -> list[NodeProblem]:
    """Returns findings about free space: bad if too little for the checkpoints, warn if little in /tmp or /dev/shm; []
    without any.

    Args:
        facts: State of the folders by node.
        run: The run's folder.
        needed: Approximate bytes of the run's checkpoints.
    """
    findings = []
    for node, f in facts.items():
        if f.free_bytes is not None and f.free_bytes < needed:
            findings.append(
                NodeProblem(
                    node,
                    "disk",
                    "bad",
                    f"{run} has {gib(f.free_bytes)}, checkpoints need about {gib(needed)}; make room, or lower "
                    "checkpoint.keep",
                )
            )
        for place, least in (("/tmp", SCRATCH_BYTES), ("/dev/shm", SHM_BYTES)):
            if f.local_free.get(place, least) < least:
                findings.append(
                    NodeProblem(
                        node, "disk", "warn", f"{place} has {gib(f.local_free[place])} free, {gib(least)} are advised"
                    )
                )
    return findings
