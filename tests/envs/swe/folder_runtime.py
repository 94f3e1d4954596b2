"""A container runtime for tests: an image is a folder, a container a copy of the folder, and commands run as processes
of this machine, without any confinement."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from skyrl_mega.envs.containers.runtime import CommandOutput
from skyrl_mega.envs.faults import InfrastructureFault
from skyrl_mega.envs.options import Option, text, whole

PATH = "tests.envs.swe.folder_runtime:FolderRuntime"
"""Import path for `skyrl_mega.envs.containers.registry.RUNTIMES`."""


class FolderContainer:
    """A copy of an image's folder."""

    open_containers: ClassVar[list[FolderContainer]] = []

    def __init__(self, image: Path) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="folder-container-"))
        shutil.copytree(image, self.root, symlinks=True, dirs_exist_ok=True)
        self._groups: list[int] = []
        self.open_containers.append(self)

    def run(
        self,
        argv: Sequence[str],
        timeout_s: float,
        *,
        stdin: bytes = b"",
        folder: str | None = None,
        variables: Mapping[str, str] | None = None,
        limit: int = 2**24,
    ) -> CommandOutput:
        """Runs a program; a word of `argv` that is the path of a repository becomes the path in the copy."""
        if not self.root.is_dir():
            raise InfrastructureFault("the container is gone")
        cwd = f"{self.root}{folder or '/'}"
        if not os.path.isdir(cwd):
            return CommandOutput("failed", 127, b"", b"no such working folder")
        words = [f"{self.root}{word}" if word.startswith(("/testbed", "/repos/")) else word for word in argv]
        process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=cwd,
            env={
                "PATH": f"{cwd}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}",
                "HOME": str(self.root),
                **(variables or {}),
            },
            start_new_session=True,
        )
        self._groups.append(process.pid)
        try:
            out, err = process.communicate(stdin, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.end_processes(1)
            process.communicate()
            return CommandOutput("timeout", None, b"", b"")
        if not self.root.is_dir():
            raise InfrastructureFault("the container is gone")
        if max(len(out), len(err)) > limit:
            return CommandOutput("output", None, out[:limit], err[:limit])
        return CommandOutput("ok" if process.returncode == 0 else "failed", process.returncode, out, err)

    def end_processes(self, timeout_s: float) -> None:
        """Kills the processes of earlier commands."""
        for group in self._groups:
            try:
                os.killpg(group, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self._groups.clear()

    def remove(self, timeout_s: float) -> None:
        """Removes the copy."""
        self.end_processes(timeout_s)
        shutil.rmtree(self.root, ignore_errors=True)
        if self in self.open_containers:
            self.open_containers.remove(self)


class FolderRuntime:
    """Starts containers from folders below the option `root`."""

    OPTIONS: ClassVar[Mapping[str, Option]] = {
        "root": text("/nowhere", "folder of the images"),
        "lifetime_s": whole(600, "not used", low=1),
    }

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.root = Path(options["root"])

    @classmethod
    def check_options(cls, options: Mapping[str, Any], key: str) -> None:
        """Accepts everything."""

    def check(self, key: str) -> None:
        """Accepts every machine."""

    def pull(self, image: str, timeout_s: float) -> None:
        """Does nothing."""

    def start(self, image: str, timeout_s: float) -> FolderContainer:
        """Copies an image."""
        if not (self.root / image).is_dir():
            raise InfrastructureFault(f"there is no image {image}")
        return FolderContainer(self.root / image)
