"""Session in a container: the repository of the image, or the task's repository copied into the container."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from skyrl_mega.common.errors import UserError
from skyrl_mega.envs.containers import files
from skyrl_mega.envs.containers.pool import ContainerPlace
from skyrl_mega.envs.containers.runtime import Container
from skyrl_mega.envs.faults import InfrastructureFault
from skyrl_mega.envs.options import Option, number, text, whole
from skyrl_mega.envs.swe.session import BOX, CommandResult, File, Files, UnfitError, entries
from skyrl_mega.envs.swe.task import Task, read_task
from skyrl_mega.envs.waiting import waiting

PATIENT_S = 120.0
"""Seconds for the second try of reading the policy's files, after a late first one."""
GRACE_S = 30.0
"""Seconds for ending the processes of a command."""
SESSION_OPTIONS: Mapping[str, Option] = {
    "image": text(None, "image of tasks that name none"),
    "start_timeout_s": number(300.0, "for each part of a start, without the pull of the image", above=0, high=86400),
    "prelude": text(None, "shell commands before every command, instead of the task's own"),
    "files_mib": whole(64, "size of all changed files of a trajectory", low=1, high=4096),
    "output_kib": whole(16384, "output of a command; more ends the command", low=1, high=2**20),
}
"""Options of a session in a container, in addition to the runtime's."""
PROBE = 'cd -- "$1" && command -v tar find xargs head >/dev/null && { command -v bash || command -v sh; }'
"""Script that prints the path of the shell."""


class ContainerLost(InfrastructureFault):
    """The container of a session ended while a command was running."""


class ContainerSession:
    """Session in a container of its own; implements `Session`.

    Args:
        task: Folder of the task.
        options: Options of the session, checked and complete.
        place: Starts and removes the container.
        tracked: True for the policy's session, whose changes are read.
    """

    def __init__(self, task: Path, options: Mapping[str, Any], place: ContainerPlace, *, tracked: bool = True) -> None:
        self.task: Task = read_task(task)
        self.options, self._place, self._tracked = options, place, tracked
        self._container: Container | None = None
        self._shell = "sh"
        self._originals: dict[str, files.Entry] = {}

    @property
    def container(self) -> Container:
        """The open container.

        Raises:
            RuntimeError: The session is not open.
        """
        if self._container is None:
            raise RuntimeError("the session is not open")
        return self._container

    @property
    def folder(self) -> str:
        """Folder of the repository in the container."""
        return self.task.folder

    def open(self, timeout_s: float) -> None:
        """Starts the container, copies the repository of a task without a repository in the image, and runs the task's
        `setup`.

        A tracked session then removes the hidden files, runs the task's `prepare`, and lists the files. `timeout_s` is
        not used: `start_timeout_s` limits each part, and counts as waiting. After an error, `close` removes the
        container.

        Raises:
            UserError: No image is named, the image does not exist, or it lacks the folder, `sh` or GNU's `find`,
                `xargs` and `tar`.
            InfrastructureFault: The container does not start in time, does not take the files, or a script of the task
                fails.
        """
        image, limit_s = image_of(self.task, self.options), float(self.options["start_timeout_s"])
        with waiting():
            self._container = self._place.start(image, limit_s)
            try:
                self._fill(image, limit_s)
            except UnfitError as error:
                raise InfrastructureFault(f"image {image}: {error}") from error

    def _fill(self, image: str, limit_s: float) -> None:
        if not self.task.in_image:
            self._checked(["mkdir", "-p", "--", self.task.folder], image, limit_s)
        self._shell = self._checked(["sh", "-c", PROBE, "sh", self.task.folder], image, limit_s).strip() or "sh"
        if not self.task.in_image:
            repository = {name: File.read(path, info) for name, path, info in entries(self.task.repo)}
            files.write(self.container, self.task.folder, repository, limit_s)
        if self.task.setup is not None:
            self._prepared("setup", self.task.setup, limit_s)
        if not self._tracked:
            return
        if self.task.hidden_paths:
            removal = "rm -rf -- " + " ".join(shlex.quote(f"./{path}") for path in self.task.hidden_paths)
            self._prepared("the removal of hidden_paths", removal, limit_s)
        if self.task.prepare is not None:
            self._prepared("prepare", self.task.prepare, limit_s)
        self._originals = files.listing(self.container, self.task.folder, limit_s)

    def _prepared(self, what: str, script: str, limit_s: float) -> None:
        """Runs a script of the task in the new container; raises InfrastructureFault unless the script succeeds."""
        ran = self.container.run([self._shell, "-c", script], limit_s, folder=self.task.folder)
        if ran.status != "ok":
            raise InfrastructureFault(f"task {self.task.path.name}: {what} failed: {ran.last_line()}")

    def _checked(self, argv: list[str], image: str, limit_s: float, folder: str | None = None) -> str:
        """Runs a command that must succeed, and returns its standard output."""
        ran = self.container.run(argv, limit_s, folder=folder)
        if ran.status == "timeout":
            raise InfrastructureFault(f"image {image}: {shlex.join(argv[:2])} took longer than {limit_s:g} s")
        if ran.status != "ok":
            last = ran.stderr.decode(errors="replace").strip()[-300:]
            raise UserError(
                f"image {image}: {shlex.join(argv)[:200]} failed in a new container ({last or ran.status})",
                key=f"task {self.task.path.name}",
                fix=f"give an image with sh, GNU find, xargs and tar, and the folder {self.task.folder}",
            )
        return ran.stdout.decode(errors="replace")

    def run(self, command: str, timeout_s: float) -> CommandResult:
        """Runs a command by `bash -c`, or `sh -c` without bash, in the repository, after the prelude; returns status,
        exit code and output. A tracked session then ends all processes. A command that is late or prints too much is no
        error: the status is `timeout` or `output`.

        Raises:
            RuntimeError: The session is not open.
            ContainerLost: The container ended.
        """
        prelude = self.options["prelude"] or self.task.prelude
        script = command if prelude is None else f"{prelude}\n{command}"
        limit = int(self.options["output_kib"]) * 1024
        container = self.container
        try:
            ran = container.run([self._shell, "-c", script], timeout_s, folder=self.task.folder, limit=limit)
            if self._tracked:  # other containers end with their command
                container.end_processes(GRACE_S)
        except InfrastructureFault as fault:
            raise ContainerLost(str(fault)) from fault
        return CommandResult(ran.status, ran.exit, (ran.stdout + ran.stderr).decode(errors="replace"))

    def after_prelude(self, argv: Sequence[str]) -> list[str]:
        """Returns a command line that runs the prelude, and then a program with the variables set by the prelude. Runs
        nothing itself.

        The prelude is shell text: the option `prelude`, else the task's own. Without a prelude, returns `argv`. Call
        this on an open session: `open` finds the container's shell.

        Args:
            argv: Program and arguments.
        """
        prelude = self.options["prelude"] or self.task.prelude
        return [*argv] if prelude is None else [self._shell, "-c", f'{prelude}\nexec "$@"', "sh", *argv]

    def changes(self, timeout_s: float, ignored: Callable[[str], bool] = lambda path: False) -> Files:
        """Returns the differences from the repository at the start of the session: path → file, None for a removed
        file. `.git`, compiled Python files, empty folders, sockets and pipes are left out.

        If the listing or the content is late, both are read once more, because the machine may be slow. The second try
        has at least `PATIENT_S` seconds, and counts as waiting, not as time of the step.

        Args:
            timeout_s: Time limit in seconds of the listing, and of the content.
            ignored: Returns True for a path whose content is not needed: None is returned for it, and its size does not
                count.

        Raises:
            UnfitError: The files cannot be read, have more than `files_mib`, or are late in the second try too.
            InfrastructureFault: The container is lost.
        """
        try:
            return self._changes(timeout_s, ignored)
        except files.LateError:
            with waiting():
                return self._changes(max(timeout_s, PATIENT_S), ignored)

    def _changes(self, timeout_s: float, ignored: Callable[[str], bool]) -> Files:
        now = files.listing(self.container, self.task.folder, timeout_s)
        changed = {name: entry for name, entry in now.items() if self._originals.get(name) != entry}
        wanted = {name: entry for name, entry in changed.items() if not ignored(name)}
        content = files.read(self.container, self.task.folder, wanted, timeout_s, self.options["files_mib"] << 20)
        removed = self._originals.keys() - now.keys()
        return {**dict.fromkeys(removed | (changed.keys() - wanted.keys())), **content}

    def read_below(self, paths: tuple[str, ...], timeout_s: float) -> dict[str, File]:
        """Returns path → file for the files and links at or below some paths of the repository; {} without any.

        Raises:
            UnfitError: The files cannot be listed, or read, in `timeout_s` seconds each, or have more than `files_mib`.
            InfrastructureFault: The container is lost.
        """
        listed = files.listing(self.container, self.task.folder, timeout_s)
        wanted = {name: entry for name, entry in listed.items() if any(f"{name}/".startswith(f"{p}/") for p in paths)}
        return files.read(self.container, self.task.folder, wanted, timeout_s, self.options["files_mib"] << 20)

    def write(self, files_: Files, timeout_s: float) -> None:
        """Writes files into the repository, and removes paths with None; follows no links. Belongs to the start of the
        container: `start_timeout_s` is the limit, not `timeout_s`, and the time counts as waiting.

        Raises:
            UnfitError: The files have impossible paths.
            InfrastructureFault: The container is lost, or does not take the files in time.
        """
        with waiting():
            files.write(self.container, self.task.folder, files_, float(self.options["start_timeout_s"]))

    def close(self, timeout_s: float) -> None:
        """Removes the container. Further calls, and a call before `open`, do nothing.

        The wait is limited by the pool; `timeout_s` is ignored. A slow removal continues in the background, a failed
        removal is tried again there; neither raises an error.
        """
        container, self._container = self._container, None
        if container is not None:
            self._place.remove(container)


def image_of(task: Task, options: Mapping[str, Any]) -> str:
    """Returns the image of a task.

    Raises:
        UserError: Neither the task nor the options name an image.
    """
    image = task.image or options["image"]
    if image is None:
        raise UserError(
            f"task {task.path.name} names no image", key=f"{BOX}.image", fix="name an image here or in task.json"
        )
    return str(image)
