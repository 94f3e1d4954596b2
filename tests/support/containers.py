"""A real podman for tests, with a store of its own and an image made of this machine's programs."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

IMAGE = "localhost/machine:1"
"""Name of the image."""
PROGRAMS = (
    "sh",
    "mv",
    "sleep",
    "date",
    "cat",
    "ls",
    "find",
    "tar",
    "mkdir",
    "rm",
    "chmod",
    "chown",
    "dd",
    "env",
    "stat",
    "setsid",
)
"""Programs of the image."""
WAYS: tuple[dict[str, list[str]], ...] = (
    {"global_arguments": [], "arguments": []},
    {
        "global_arguments": ["--runtime=runc"],
        "arguments": ["--ulimit=nofile=1024:1024", "--ulimit=nproc=4096:4096"],
    },
)
"""Options with which podman starts containers on some machines: the defaults, and runc with low limits."""


def libraries(program: str) -> set[str]:
    """Returns the paths of the libraries of a program, as the loader finds them."""
    listed = subprocess.run(["ldd", program], capture_output=True, text=True, timeout=30, check=False).stdout
    return set(re.findall(r"(/\S+) \(0x", listed))


def image_archive(programs: Iterable[str]) -> bytes:
    """Returns a tar archive of a root folder with programs of this machine and their libraries."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", dereference=True) as archive:
        for folder, mode in (("tmp", 0o1777), ("root", 0o700), ("work", 0o755)):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, mode
            archive.addfile(entry)
        found: set[str] = set()
        for name in programs:
            path = shutil.which(name, path="/usr/bin:/bin") or pytest.skip(f"this machine has no program {name}")
            archive.add(path, f"bin/{name}")
            found |= libraries(path)
        for path in sorted(found):
            archive.add(path, path)
    return buffer.getvalue()


def podman_options(folder: Path, archive: bytes | None = None) -> dict[str, Any]:
    """Returns options of the runtime `podman` with which containers of `IMAGE` start; skips the test if none start.

    Args:
        folder: Empty folder for the store of images and containers. Give it to `remove_store` at the end.
        archive: Root folder of the image as a tar archive; None for `PROGRAMS`.
    """
    if shutil.which("podman") is None:
        pytest.skip("podman is not installed")
    places = [f"--root={folder}/root", f"--runroot={folder}/run", f"--tmpdir={folder}/tmp"]
    made = podman(places, "import", "-", IMAGE, stdin=archive or image_archive(PROGRAMS))
    for way in WAYS if made.returncode == 0 else ():
        words = [
            "run",
            "--rm",
            "--network=none",
            "--memory=64m",
            *way["arguments"],
            "--entrypoint=sh",
            IMAGE,
            "-c",
            ":",
        ]
        made = podman([*places, *way["global_arguments"]], *words)
        if made.returncode == 0:
            return {"global_arguments": [*places, *way["global_arguments"]], "arguments": way["arguments"]}
    remove_store(folder)
    pytest.skip(f"podman starts no container on this machine: {made.stderr.decode(errors='replace').strip()[-300:]}")


def remove_store(folder: Path) -> None:
    """Removes a store of images and containers with its mounts."""
    places = [f"--root={folder}/root", f"--runroot={folder}/run", f"--tmpdir={folder}/tmp"]
    podman(places, "rm", "--all", "--force", "--time=0")
    podman(places, "rmi", "--all", "--force")
    for mount in re.findall(rf"\S+ ({re.escape(str(folder))}\S*) ", Path("/proc/mounts").read_text()):
        subprocess.run(["umount", "--lazy", mount], check=False, timeout=30)


def podman(places: list[str], *words: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Runs podman with arguments before and after the subcommand."""
    return subprocess.run(["podman", *places, *words], input=stdin, capture_output=True, timeout=120, check=False)
