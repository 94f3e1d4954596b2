"""A client program of the policy: command, working folder, end and answer; in the sandbox or as a plain process."""

from __future__ import annotations

import errno
import json
import os
import shlex
import shutil
import stat
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from skyrl_mega.common.errors import UserError
from skyrl_mega.envs.agent import AgentEndpoint
from skyrl_mega.envs.faults import InfrastructureFault
from skyrl_mega.envs.sandbox import Sandbox, SandboxResult, Workspace, confinements, interpreter, variables
from skyrl_mega.envs.sandbox.listen import HOST, PORT
from skyrl_mega.envs.sandbox.run import KILLED

TASK, ANSWER = "task.json", "answer.txt"
"""Files of the working folder: the task, and an optional answer."""
TASK_VARIABLE = "SKYRL_TASK"
"""Environment variable with the path of the task's file."""
SCRIPTS = (".py", ".sh", ".js", ".mjs", ".ts")
"""Endings of arguments that must be files."""


@dataclass(frozen=True)
class Program:
    """A program, started once per trajectory.

    Args:
        argv: Absolute path of the program, and its arguments.
        box: Sandbox, or plain processes of this user (`Sandbox.confined`).
        timeout_s: Seconds from start to end.
        environment: Further environment variables.
        kill_is_fault: True if a SIGKILL, or an end for memory, is a fault of the machine: the program runs no code of
            the policy.
    """

    argv: tuple[str, ...]
    box: Sandbox
    timeout_s: float
    environment: Mapping[str, str]
    kill_is_fault: bool = True

    def within(self, seconds: float | None) -> Program:
        """Returns the program with a time limit of at most `seconds`; None changes nothing."""
        return self if seconds is None else replace(self, timeout_s=min(self.timeout_s, seconds))

    def run(self, endpoint: AgentEndpoint, folder: Workspace, files: Mapping[str, str]) -> SandboxResult:
        """Runs the program to the end, or to a limit. All processes of the program are dead on return.

        Args:
            endpoint: Address and key of the policy; in a sandbox the only reachable address.
            folder: Working folder.
            files: Name → text of files, written into the folder first, `TASK` included.

        Returns:
            The result. A program ended by a limit is not an error: the status names the limit, such as `timeout`. The
            status `memory`, and an end by a SIGKILL that no limit sent, are returned only if `kill_is_fault` is False.

        Raises:
            InfrastructureFault: The program cannot be started, or the sandbox around it was killed. If `kill_is_fault`
                is True, also for the two ends above.
            UserError: The machine lacks an isolation feature that the sandbox requires.
        """
        inside = replace(endpoint, url=f"http://{HOST}:{PORT}") if self._has_own_network(endpoint) else endpoint
        result = self.box.run(
            self.argv,
            files=files,
            workspace=folder,
            limits=replace(self.box.limits, wall_s=self.timeout_s),
            environment={**self.environment, **inside.variables(), TASK_VARIABLE: Path(TASK)},
            serve=endpoint.serve,
        )
        if self.kill_is_fault and result.status == "memory":
            raise InfrastructureFault("the program was ended, because all programs together used too much memory")
        if self.kill_is_fault and result.status == "failed" and result.exit in KILLED:
            raise InfrastructureFault("the program was killed by a SIGKILL that no limit sent")
        return result

    def _has_own_network(self, endpoint: AgentEndpoint) -> bool:
        ways = confinements(self.box.disabled).get("network", ()) if self.box.confined else ()
        return endpoint.serve is not None and "network namespace" in ways


def check_variables(variables: Mapping[Any, Any], key: str) -> None:
    """Checks names and values of a setting with environment variables; `key` is the setting.

    Raises:
        UserError: A name is empty or contains `=`, or a value is neither a text nor None.
    """
    for name, value in variables.items():
        if not (value is None or isinstance(value, str)) or not name or "=" in str(name):
            raise UserError(
                "allowed is a name and a text, or null for the run's own value", key=f"{key}.{name}", value=value
            )


def values_of(variables: Mapping[str, str | None], key: str) -> dict[str, str]:
    """Returns the environment variables of a setting, with the run's own values in the place of None.

    Args:
        variables: Name → value; None for the value in the environment of this process.
        key: The setting, for errors.

    Raises:
        UserError: The run has no variable of a name.
    """
    values = {name: os.environ.get(name) if value is None else value for name, value in variables.items()}
    for name, value in values.items():
        if value is None:
            raise UserError("the run has no such variable", key=f"{key}.{name}", fix=f"export {name}=…")
    return {name: value for name, value in values.items() if value is not None}


def check_box(box: Sandbox, key: str) -> None:
    """Checks by trials that this machine can confine an agent's program in the ways of `Sandbox.check`, and can limit
    the program's network to the endpoint. The network is not checked if the sandbox is set to work without this limit.
    Does nothing for a program outside of a sandbox.

    Args:
        box: Sandbox of the program.
        key: Setting of the sandbox, for errors.

    Raises:
        UserError: This machine lacks a confinement, such as network namespaces, or the limits are too small.
        InfrastructureFault: The sandbox does not start.
    """
    if not box.confined:
        return
    box.check(key)
    if "network" not in box.without:
        try:
            box.run([shutil.which("true") or "/bin/true"], serve=lambda listener: listener.close())
        except UserError as error:
            raise UserError(f"an agent needs a network namespace of its own: {error}", key=key) from error


def read_answer(folder: Workspace, most_bytes: int) -> str | None:
    """Returns the text of the file `ANSWER` in the workspace `folder`, cut after `most_bytes`; None without the file.
    Anything but a plain readable file, such as a link, counts as an empty text.

    Raises:
        InfrastructureFault: This machine cannot read the file: too many open files, or an error of the disk.
    """
    place = os.open(folder.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(ANSWER, flags, dir_fd=place)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return ""
            with open(fd, "rb", closefd=False) as file:
                return file.read(most_bytes).decode(errors="replace")
        finally:
            os.close(fd)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.EIO):
            raise InfrastructureFault(f"{ANSWER} cannot be read: {error.strerror}") from error
        return ""
    finally:
        os.close(place)


def split(command: str, key: str) -> list[str]:
    """Returns the words of a command, split as by a shell.

    Raises:
        UserError: A quotation is not closed, or the command has no word.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UserError(error, key=key, value=command, fix="close the quotation") from error
    if not words:
        raise UserError("it has no word; allowed is a program and its arguments", key=key, value=command)
    return words


def words_of(command: str, key: str) -> list[str]:
    """Returns the words of a command, split as by a shell, with absolute paths. A relative path starts at the current
    folder of this process.

    The first word, the program, becomes absolute if it contains a `/`, even if there is no such file. Another word
    becomes absolute if it names an existing file, or if it contains a `/` and names an existing folder.

    Args:
        command: Program and arguments.
        key: Setting with the command, for errors.

    Raises:
        UserError: A quotation is not closed, or the command has no word.
    """
    words = split(command, key)
    first = os.path.abspath(words[0]) if "/" in words[0] else words[0]
    return [first, *(os.path.abspath(word) if _is_path(word) else word for word in words[1:])]


def _is_path(word: str) -> bool:
    return os.path.isfile(word) or ("/" in word and os.path.isdir(word))


def find_program(word: str, confined: bool, key: str) -> str:
    """Returns the absolute path of a program.

    Args:
        word: Absolute path, or a name looked up in the `PATH` of the program.
        confined: True for the `PATH` inside the sandbox: this interpreter's folder, then the system's folders.
        key: Setting with the command, for errors.

    Raises:
        UserError: There is no such program.
    """
    path = (variables.inside() if confined else variables.of_this_user())["PATH"]
    program = shutil.which(word, path=path)
    if program is None:
        where = "" if "/" in word else f" in {path}"
        raise UserError(f"there is no program {word}{where}", key=key, fix="give the program's path")
    return os.path.abspath(program)


def readable(argv: list[str], more: list[str]) -> tuple[str, ...]:
    """Returns the paths that a sandbox must let a program read (`Sandbox.read`), sorted: the program, the existing
    files and folders among the arguments, `more`, and the targets of links. Leaves out paths below the system's
    folders, such as `/usr`, which every sandbox can read. For a program in a virtual environment, adds the paths of the
    environment and of its interpreter, also below the system's folders.

    Args:
        argv: Absolute path of the program, and its arguments. Only absolute paths count as files and folders.
        more: Further paths, which need not exist.
    """
    named = [argv[0], *(word for word in argv[1:] if os.path.isabs(word) and os.path.exists(word)), *more]
    paths = {path for name in map(os.path.abspath, named) for path in (name, os.path.realpath(name))}
    system = ("/usr/", "/bin/", "/lib/", "/sbin/")
    return tuple(sorted({p for p in paths if not p.startswith(system)} | set(interpreter.paths_of(argv[0]))))


def task_text(prompt: Any, columns: Mapping[str, Any]) -> str:
    """Returns the task's file: a JSON object with the messages under `prompt`, and the row's columns. Values unknown to
    JSON, such as dates, are written as text.
    """
    return json.dumps({**columns, "prompt": prompt}, ensure_ascii=False, default=str, indent=1)
