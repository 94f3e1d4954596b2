"""Processes in namespaces of their own, as containers of the fake clients."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

NAMESPACES = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation", "private")
OWN_FILES = 'mount -t tmpfs box /tmp && cd /usr && exec "$@"'


def client(folder: Path, module: str) -> str:
    """Writes a program that runs `main` of a module beside this file, and returns the program's path."""
    lines = (f"#!{sys.executable} -SE", "import sys", f"sys.path.insert(0, {str(Path(__file__).parent)!r})")
    program = folder / module.removeprefix("fake_")
    program.write_text("\n".join([*lines, f"import {module}", f"{module}.main()", ""]))
    program.chmod(0o755)
    return str(program)


def start(command: list[str]) -> int:
    """Starts process 1 of a container, and returns the process that keeps the container alive."""
    with open(os.devnull, "r+b") as null:
        box = subprocess.Popen(
            [*NAMESPACES, "sh", "-c", OWN_FILES, "box", *command],
            stdin=null,
            stdout=null,
            stderr=null,
            start_new_session=True,
        )
    deadline = time.monotonic() + 20
    while first_process(box.pid) is None and time.monotonic() < deadline:
        time.sleep(0.02)
    return box.pid


def first_process(pid: int) -> int | None:
    """Returns process 1 of a container, as seen from here; None if it has ended, or is not yet ready."""
    try:
        first = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
        ready = Path(f"/proc/{first}/cwd").readlink() == Path("/usr")
    except (FileNotFoundError, ProcessLookupError, IndexError):
        return None
    return first if ready else None


def inside(first: int, variables: dict[str, str]) -> list[str]:
    """Returns the words before a program that runs in a container."""
    given = {"PATH": "/usr/bin:/bin", "OF_THE_IMAGE": "kept", **variables}
    words = [f"{name}={value}" for name, value in given.items()]
    return ["nsenter", f"--target={first}", "--mount", "--pid", "--wd=/usr", "env", "-i", *words]
