"""Contract of a session: a machine for running commands, one per trajectory. Containers and remote sandboxes can
implement the contract too.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from skyrl_mega.common.errors import UserError
from skyrl_mega.envs.sandbox import Sandbox, Workspace, tree

BOX = "environment.options.swe.session_options"


@dataclass(frozen=True)
class CommandResult:
    """Result of a command."""

    status: str
    """`ok`, `failed`, `timeout`, or another word for the kind of end."""
    exit: int | None
    """Exit code; None if the command was ended from outside."""
    output: str
    """stdout, then stderr."""


@dataclass(frozen=True)
class File:
    """A file of a repository, or a link."""

    data: bytes
    """Content of a file, or target of a link."""
    mode: int = 0o644
    """Permissions of a file."""
    link: bool = False
    """True for a symbolic link."""

    @classmethod
    def read(cls, path: str, info: os.stat_result) -> File:
        """Returns the file or link at a path of this machine, with the status `info`; follows no link. Raises OSError
        if it cannot be read."""
        link = stat.S_ISLNK(info.st_mode)
        data = os.fsencode(os.readlink(path)) if link else Path(path).read_bytes()
        return cls(data, stat.S_IMODE(info.st_mode), link)


Files = Mapping[str, File | None]
"""Path in the repository → file; None for no file."""


class UnfitError(Exception):
    """The policy's files cannot be copied to another session: the policy's work has failed, not the run."""


class Session(Protocol):
    """A machine with a copy of the task's repository, created as `cls(task, options)`; `timeout_s` bounds every call. A
    trajectory works in a session of its own; every run of the tests uses a fresh session.

    A command that exceeds the time limit returns a `CommandResult` with status `timeout`, and the session continues.
    All other failures (the machine is lost, no machine is free) raise an exception, and end only this trajectory.

    Args:
        task: Folder of the task, with `repo/`.
        options: `environment.options.swe.session_options`.
    """

    def __init__(self, task: Path, options: Mapping[str, Any]) -> None: ...

    def open(self, timeout_s: float) -> None:
        """Creates the machine, with the repository as the working folder, within `timeout_s` seconds."""

    def run(self, command: str, timeout_s: float) -> CommandResult:
        """Runs a shell command; no process started by the command survives.

        Args:
            command: The command.
            timeout_s: Time limit in seconds; a late command returns the status `timeout`.
        """

    def changes(self, timeout_s: float) -> Files:
        """Returns path → file for the files that differ from the task's repository, None for a removed file; raises
        UnfitError if the files cannot be read."""

    def write(self, files: Files, timeout_s: float) -> None:
        """Writes files into the repository, and removes paths with None; follows no links; raises UnfitError if the
        space is too small."""

    def close(self, timeout_s: float) -> None:
        """Releases the machine; called once, also after a failure, and even if the session was never opened."""


class LocalSession:
    """Session with a copy of the repository in a workspace, and commands in the project's own sandbox."""

    def __init__(self, task: Path, options: Mapping[str, Any]) -> None:
        self.repo = task / "repo"
        self.workspace: Workspace | None = None
        self.box = Sandbox.from_options(options, BOX)

    def open(self, timeout_s: float) -> None:
        """Copies the task's repository to a new workspace; ignores `timeout_s`.

        Raises:
            UserError: The task has no repository, or the repository exceeds the disk limit.
        """
        self.workspace = self.box.workspace()
        _copy(self.repo, self.folder)

    def run(self, command: str, timeout_s: float) -> CommandResult:
        """Runs `sh -c command` in the sandbox, in the copy of the repository, and returns status, exit code and output;
        after `timeout_s` seconds the command ends with the status `timeout`.

        Raises:
            RuntimeError: The session is not open.
            InfrastructureFault: The sandbox cannot start the command.
            UserError: The machine lacks an isolation feature that the sandbox requires.
        """
        limits = replace(self.box.limits, wall_s=timeout_s, cpu_s=int(timeout_s) + 1)
        outcome = self.box.run(["/bin/sh", "-c", command], workspace=self._open_workspace(), limits=limits)
        return CommandResult(outcome.status, outcome.exit, outcome.stdout + outcome.stderr)

    def changes(self, timeout_s: float) -> Files:
        """Returns the differences between the copy and the task's repository: path → file, None for a removed file.

        Sockets, pipes and empty folders are left out. Ignores `timeout_s`.

        Raises:
            RuntimeError: The session is not open.
            UnfitError: The files cannot be read, or exceed the disk limit.
        """
        changed: dict[str, File | None] = {}
        space_left, originals = self._open_workspace().disk, {name: info for name, _, info in entries(self.repo)}
        try:
            for name, path, info in entries(self.folder, tree.folders(str(self.folder))):
                before = originals.pop(name, None)
                if before is not None and _signature(before) == _signature(info):
                    continue
                space_left -= info.st_size
                if space_left < 0:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                changed[name] = File.read(path, info)
        except OSError as error:
            raise UnfitError(f"files cannot be read: {error.strerror}") from error
        return {**dict.fromkeys(originals), **changed}

    def write(self, files: Files, timeout_s: float) -> None:
        """Writes files after all removals, so a name can change from a folder to a file. Follows no links: a link or a
        file in the place of a parent folder is removed.

        Args:
            files: Path → file; None removes the file.
            timeout_s: Unused.

        Raises:
            RuntimeError: The session is not open.
            UnfitError: The files cannot be written.
        """
        folder = self.folder
        owner = folder.stat().st_uid
        try:
            for name, file in sorted(files.items(), key=lambda item: item[1] is not None):
                if file is not None:
                    _write_file(file, folder, Path(name), owner)
                elif not any((folder / parent).is_symlink() for parent in Path(name).parents[:-1]):
                    tree.remove(str(folder / name))
        except OSError as error:
            raise UnfitError(f"files cannot be written: {error.strerror}") from error

    def close(self, timeout_s: float) -> None:
        """Removes the copy of the repository; may be called again, and before `open`. Ignores `timeout_s`."""
        if self.workspace is not None:
            self.workspace.close()
            self.workspace = None

    @property
    def folder(self) -> Path:
        """Path of the copy of the repository, for this process.

        Raises:
            RuntimeError: The session is not open.
        """
        return self._open_workspace().folder

    def _open_workspace(self) -> Workspace:
        if self.workspace is None:
            raise RuntimeError("the session is not open")
        return self.workspace


def entries(top: Path, folders: Iterable[str] | None = None) -> Iterator[tuple[str, str, os.stat_result]]:
    """Yields (path below `top`, full path, status) of every file and link, in no particular order; follows no links.

    Args:
        top: The top folder.
        folders: Paths of the folders to list; None for `top` and all folders below.

    Raises:
        OSError: One of `folders` cannot be listed. With None, folders that cannot be listed are left out.
    """
    for folder in folders or (path for path, _, _ in os.walk(top)):
        with os.scandir(folder) as scan:
            for entry in scan:
                info = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(info.st_mode) or stat.S_ISLNK(info.st_mode):
                    yield entry.path[len(str(top)) + 1 :], entry.path, info


def _signature(info: os.stat_result) -> tuple[int, ...]:
    """Returns mode, size and time: equal for a file, or a link, copied and then left alone."""
    return info.st_mode, info.st_size, info.st_mtime_ns


def _copy(source: Path, folder: Path) -> None:
    if not source.is_dir():
        raise UserError(f"{source} does not exist; allowed: a task's folder has repo/")
    try:
        shutil.copytree(source, folder, symlinks=True, dirs_exist_ok=True)
    except (shutil.Error, OSError) as error:
        if "No space left" not in str(error):
            raise
        raise UserError(
            f"{source} does not fit", key=f"{BOX}.disk_mib", fix="give more than the repository takes"
        ) from error


def _write_file(file: File, folder: Path, relative: Path, owner: int) -> None:
    """Writes a file; a link or a file in the place of a parent folder is removed."""
    parent = folder
    for part in relative.parts[:-1]:
        parent = parent / part
        if parent.is_symlink() or (parent.exists() and not parent.is_dir()):
            parent.unlink()
        if not parent.exists():
            parent.mkdir()
            os.chown(parent, owner, -1)
    target = folder / relative
    tree.remove(str(target))
    if file.link:
        os.symlink(os.fsdecode(file.data), target)
    else:
        target.write_bytes(file.data)
        target.chmod(file.mode & 0o777)
    os.chown(target, owner, -1, follow_symlinks=False)
