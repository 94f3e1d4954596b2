"""A container of podman or docker, by the command line of its client."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from skyrl_mega.common.secret_names import names_secret
from skyrl_mega.envs.containers.memory_kills import memory_kills, others_caused
from skyrl_mega.envs.containers.program import COMMAND_S, Client
from skyrl_mega.envs.containers.runtime import CommandOutput
from skyrl_mega.envs.faults import InfrastructureFault

SIGKILLED = 137
"""Exit code of a container, or of a command in a container, that was ended by SIGKILL."""
ERROR = re.compile(rb"^Error: |^OCI runtime", re.M)
"""Error of podman in standard error, with exit code 125 or 255."""
DAEMON_ERROR = re.compile(rb"^(?:Error response from daemon|Cannot connect to|error during connect)", re.M)
"""Error of docker in standard error, with exit code 1."""
WITH_MARK = 'echo "$0" >&2 && exec "$@"'
"""Script that prints a mark to standard error and becomes the program. With the mark, a failure is the program's, not
the client's. A policy that replaces `sh` can only hide the mark of its own programs."""
LONGEST_ARGUMENTS = 120_000
"""Maximum length of all arguments of a command, in bytes; the kernel refuses an argument of 128 KiB."""


@dataclass(frozen=True)
class DockerClient(Client):
    """The command line of podman or docker.

    Args:
        words: The program and the arguments before a subcommand.
        user: User of commands in containers; None for the image's user.
    """

    user: str | None = None

    def exec_words(self, user: str | None = None) -> list[str]:
        """Returns the first words of a subcommand: `exec`, and `--user=…` if there is a user.

        The caller appends further options, the container's name and the command. `Client.command` puts the client's
        `words` before the subcommand.

        Args:
            user: User of the command; None for the client's `user`.
        """
        user = user or self.user
        return ["exec", *([f"--user={user}"] if user else [])]


class CommandLineContainer:
    """A running container of podman or docker.

    A container may end early. If the policy is the cause, `run` returns the status `failed` without an exit code, and
    so do later calls. If the cause is outside the container, `run` raises InfrastructureFault:

    - The memory limit of the container, or an end of process 1 by itself: the policy.
    - A SIGKILL of process 1, a removed container, the end of `lifetime_s`, an unreachable daemon: outside.

    Args:
        client: The client that started the container.
        name: Name of the container.
        lifetime_s: Seconds from now after which the container ends by itself.
    """

    def __init__(self, client: DockerClient, name: str, lifetime_s: float) -> None:
        self.client, self.name = client, name
        self._lifetime_over = time.monotonic() + lifetime_s
        self._memory_kills = memory_kills()
        self._restarted = False
        self._result_of_all: CommandOutput | None = None
        """Result of every command after an end caused by the policy."""

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
        """Runs a program in the container, as the container's user, waits for its end, and returns status, exit code
        and output.

        A program that is late (status `timeout`) or prints too much (`output`) is killed with all other processes of
        the container. Arguments that no program can receive give the status `failed`. If the client has failed before
        the program's start, the container is restarted, and the program runs in the remaining time.

        Args:
            argv: Program and arguments; no shell is involved.
            timeout_s: Time limit in seconds.
            stdin: Standard input.
            folder: Working folder; None for the image's own.
            variables: Environment variables, in addition to the image's.
            limit: Maximum size of standard output, and of standard error, in bytes.

        Raises:
            InfrastructureFault: The container was ended from outside, or the client does not work or was killed, as
                when the run gives up on the environment's step.
        """
        words = self.client.exec_words()
        words += ["--interactive"] if stdin else []
        words += [f"--workdir={folder}"] if folder else []
        keys = {name: value for name, value in (variables or {}).items() if names_secret(name)}
        words += [
            f"--env={name}" if name in keys else f"--env={name}={value}" for name, value in (variables or {}).items()
        ]
        if refused := _refuse_arguments([*words, *argv, *keys.values()]):
            return refused
        mark, deadline = secrets.token_hex(16).encode() + b"\n", time.monotonic() + timeout_s
        words = [*words, self.name, "sh", "-c", WITH_MARK, mark.decode().strip(), *argv]
        for is_last in (False, True):
            left_s, most = max(1.0, deadline - time.monotonic()) if is_last else timeout_s, limit + len(mark)
            ran = self.client.command(words, left_s, stdin=stdin, limit=most, variables=keys, cancellable=True)
            has_started, ran = mark in ran.stderr, _without_mark(ran, mark, limit)
            if ran.status in ("timeout", "output"):
                self.end_processes(COMMAND_S)
                return self._result_of_all or ran
            if ran.exit is None:
                raise InfrastructureFault(f"{self.client.words[0]} exec was killed")
            failed = not has_started and _client_may_have_failed(ran)
            if (failed or ran.exit == SIGKILLED) and (ended := self._end()) is not None:
                return ended
            if is_last or not failed:
                break
            self._restart(COMMAND_S)
        self._memory_kills = memory_kills()
        return self._result_of_all or ran

    def end_processes(self, timeout_s: float) -> None:
        """Kills all processes in the container except process 1, within `timeout_s` seconds. If no program can be
        started in the container, because its processes have reached the limit, the container is restarted with its
        files.

        Root in the container can replace `sh`, and then keep processes until the container is removed.

        Raises:
            InfrastructureFault: The container was ended from outside, or the client does not work.
        """
        deadline = time.monotonic() + timeout_s
        ran = self.client.command([*self.client.exec_words("0"), self.name, "sh", "-c", "kill -9 -1"], timeout_s / 2)
        if ran.status == "ok" or self._end() is not None:
            return
        self._restart(max(1.0, deadline - time.monotonic()))

    def remove(self, timeout_s: float) -> None:
        """Removes the container with its files; may be called again. Raises nothing if the container is gone.

        Raises:
            InfrastructureFault: The container cannot be removed in `timeout_s` seconds.
        """
        ran = self.client.command(["rm", "--force", "--volumes", self.name], timeout_s)
        if ran.status != "ok" and b"no such container" not in ran.stderr.lower():
            raise InfrastructureFault(f"the container {self.name} cannot be removed: {ran.last_line()}")

    def process(self) -> int:
        """Returns the process id, on this machine, of process 1 of the container.

        Raises:
            InfrastructureFault: The container does not run, or runs on another machine.
        """
        ran = self.client.command(["container", "inspect", "--format", "{{.State.Pid}}", self.name])
        number = ran.stdout.decode(errors="replace").strip()
        if not number.isdecimal() or int(number) == 0 or not Path(f"/proc/{number}").exists():
            raise InfrastructureFault(f"the container {self.name} has no process here: {ran.last_line()}")
        return int(number)

    def _restart(self, timeout_s: float) -> None:
        """Kills all processes and starts process 1 again, with the container's files. From then on every end of the
        container counts as the policy's, which may have replaced the program of process 1.

        Raises:
            InfrastructureFault: The client does not work.
        """
        self._restarted = True
        ran = self.client.command(["restart", "-t", "0", self.name], timeout_s)
        if ran.status != "ok" and self._end() is None:
            raise InfrastructureFault(f"processes of a container cannot be ended: {ran.last_line()}")

    def _end(self) -> CommandOutput | None:
        """Returns None if the container runs, else the result of every command after an end caused by the policy.

        Raises:
            InfrastructureFault: The container was ended from outside.
        """
        if self._result_of_all is None:
            reason = self._reason_of_end()
            if reason is not None:
                self._result_of_all = CommandOutput("failed", None, b"", f"the container ended: {reason}".encode())
        return self._result_of_all

    def _reason_of_end(self) -> str | None:
        shown = "{{.State.Running}} {{.State.OOMKilled}} {{.State.ExitCode}}"
        ran = self.client.command(["container", "inspect", "--format", shown, self.name])
        words = ran.stdout.decode(errors="replace").split()
        if ran.status != "ok" or len(words) != 3:
            raise InfrastructureFault(f"the container {self.name} is gone: {ran.last_line()}")
        if words[0] == "true":
            return None
        if self._restarted:
            return f"after a restart, with exit code {words[2]}"
        if words[1] == "true" or (words[2] == str(SIGKILLED) and self._was_killed_for_memory()):
            return "its processes used too much memory"
        if words[2] == str(SIGKILLED):
            raise InfrastructureFault(f"the container {self.name} was killed from outside")
        if time.monotonic() > self._lifetime_over - 1:
            raise InfrastructureFault(f"the container {self.name} ended after its lifetime_s")
        return f"process 1 ended with exit code {words[2]}"

    def _was_killed_for_memory(self) -> bool:
        """Returns True if the kernel has killed processes for memory since the last command, unless its log shows that
        all of them were outside of this container. Podman does not always notice such a kill of process 1."""
        if (kills := memory_kills() - self._memory_kills) <= 0:
            return False
        ran = self.client.command(["container", "inspect", "--format", "{{.Id}}", self.name])
        number = ran.stdout.decode(errors="replace").strip()
        return not (number and others_caused(number, kills))


def _without_mark(ran: CommandOutput, mark: bytes, limit: int) -> CommandOutput:
    """Returns the result of a program without its mark, and with the limit of output that holds without the mark."""
    stderr = ran.stderr.replace(mark, b"", 1)
    if max(len(ran.stdout), len(stderr)) > limit:
        ran = replace(ran, status="output", exit=None)
    return replace(ran, stdout=ran.stdout[:limit], stderr=stderr[:limit])


def _client_may_have_failed(ran: CommandOutput) -> bool:
    """Returns True for an exit code and an error as of a client that cannot run a program in the container. A program
    can imitate both."""
    if ran.exit == 1:
        return DAEMON_ERROR.search(ran.stderr[-4096:]) is not None
    return ran.exit in (125, 255) and ERROR.search(ran.stderr[-4096:]) is not None


def _refuse_arguments(words: Sequence[str]) -> CommandOutput | None:
    """Returns a failed result for arguments that no program can receive; None for others."""
    if any("\0" in word for word in words):
        return CommandOutput("failed", 2, b"", b"an argument cannot contain NUL")
    if sum(len(word.encode(errors="surrogateescape")) for word in words) > LONGEST_ARGUMENTS:
        return CommandOutput("failed", 126, b"", b"the arguments are too long")
    return None
