"""A place where commands run, one per trajectory: a contract that a container or a remote sandbox can keep too."""

from __future__ import annotations

import fnmatch
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from skyrl_mega.config.errors import UserError
from skyrl_mega.envs.sandbox import Sandbox, Workspace, tree

BOX = "environment.options.swe.session_options"


@dataclass(frozen=True)
class Ran:
    """What became of a command."""

    status: str
    """`ok`, `failed`, `timeout`, or another word for how it was ended."""
    exit: int | None
    output: str
    """stdout, then stderr."""


class Session(Protocol):
    """One trajectory's machine. Made as `cls(task, options)`; every call is bounded by its `timeout_s`.

    A command that takes too long ends as a `Ran` with status `timeout`, and the session goes on. Whatever else goes
    wrong (the machine is gone, it cannot be had) raises, and ends this trajectory alone.

    Args:
        task: The task's folder: `repo/` to work in, and what `restore` brings.
        options: `environment.options.swe.session_options`.
    """

    def __init__(self, task: Path, options: Mapping[str, Any]) -> None: ...

    def open(self, timeout_s: float) -> None:
        """Makes the machine, with the repository as its working folder."""

    def run(self, command: str, timeout_s: float) -> Ran:
        """Runs a shell command there; nothing that it started lives on."""

    def restore(self, patterns: Iterable[str], timeout_s: float) -> None:
        """Brings files that match (`tests/*`, …) back to what the task says, hidden tests included."""

    def close(self, timeout_s: float) -> None:
        """Gives the machine back; called once, also after a failure, and whether or not it was opened."""


class LocalSession:
    """A copy of the repository in a workspace, commands in the project's own sandbox."""

    def __init__(self, task: Path, options: Mapping[str, Any]) -> None:
        self.task = task
        self.workspace: Workspace | None = None
        self.spoilt: str | None = None
        """Why the tests cannot be put where they belong, once that is so: every command fails then."""
        self.box = Sandbox.of(options, BOX)

    def open(self, timeout_s: float) -> None:
        """Copies the repository."""
        self.workspace = self.box.workspace()
        _copy(self.task / "repo", self.folder)

    def run(self, command: str, timeout_s: float) -> Ran:
        """Runs `sh -c command` in the sandbox."""
        if self.spoilt is not None:
            return Ran("failed", None, self.spoilt)
        limits = replace(self.box.limits, wall_s=timeout_s, cpu_s=int(timeout_s) + 1)
        outcome = self.box.run(["/bin/sh", "-c", command], workspace=self._opened(), limits=limits)
        return Ran(outcome.status, outcome.exit, outcome.stdout + outcome.stderr)

    def restore(self, patterns: Iterable[str], timeout_s: float) -> None:
        """Removes what matches and copies it again, without following any link that was made there.

        A policy may have left no room for it, or a name that nothing can take: then the work has failed, not the run.
        """
        folder, wanted = self.folder, list(patterns)
        try:
            for path in tree.folders(str(folder)):
                for name in os.listdir(path):
                    file = Path(path, name)
                    if _matches(file.relative_to(folder), wanted):
                        tree.remove(str(file))
            self._bring(wanted)
        except OSError as error:
            self.spoilt = f"the tests cannot be restored: {error.strerror}"

    def _bring(self, wanted: list[str]) -> None:
        folder = self.folder
        owner = folder.stat().st_uid
        for source in (self.task / "repo", self.task / "hidden"):
            for file in sorted(source.rglob("*")) if source.is_dir() else []:
                relative = file.relative_to(source)
                if file.is_file() and (source.name == "hidden" or _matches(relative, wanted)):
                    _put(file, folder, relative, owner)

    def close(self, timeout_s: float) -> None:
        """Removes the copy."""
        if self.workspace is not None:
            self.workspace.close()
            self.workspace = None

    @property
    def folder(self) -> Path:
        """The copy.

        Raises:
            RuntimeError: The session is not open.
        """
        return self._opened().folder

    def _opened(self) -> Workspace:
        if self.workspace is None:
            raise RuntimeError("the session is not open")
        return self.workspace


def _matches(relative: Path, patterns: Iterable[str]) -> bool:
    """Also in capitals: `EVIL.DIST-INFO` holds plug-ins as `evil.dist-info` does."""
    return any(fnmatch.fnmatch(str(relative).lower(), pattern.lower()) for pattern in patterns)


def _copy(source: Path, folder: Path) -> None:
    if not source.is_dir():
        raise UserError(f"{source} does not exist; allowed: a task's folder has repo/")
    try:
        shutil.copytree(source, folder, symlinks=True, dirs_exist_ok=True)
    except (shutil.Error, OSError) as error:
        if "No space left" not in str(error):
            raise
        raise UserError(f"{BOX}.disk_mib: {source} does not fit; give more than the repository takes") from error


def _put(file: Path, folder: Path, relative: Path, owner: int) -> None:
    """Writes one file of the task; a link or a file where a folder belongs gives way."""
    place = folder
    for part in relative.parts[:-1]:
        place = place / part
        if place.is_symlink() or (place.exists() and not place.is_dir()):
            place.unlink()
        if not place.exists():
            place.mkdir()
            os.chown(place, owner, -1)
    target = folder / relative
    if target.is_symlink() or target.is_file():
        target.unlink()
    elif target.is_dir():
        tree.remove(str(target))
    shutil.copyfile(file, target)
    shutil.copymode(file, target)
    os.chown(target, owner, -1)
