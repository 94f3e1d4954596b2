"""The contract of a container runtime: starts containers of an image, runs commands in them, and removes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from skyrl_mega.envs.options import Option


@dataclass(frozen=True)
class CommandOutput:
    """Result of a command in a container."""

    status: str
    """`ok` (exit code 0), `failed` (another exit code), `timeout`, or `output` (more output than allowed)."""
    exit: int | None
    """Exit code; None if the command was ended from outside."""
    stdout: bytes
    """Standard output, at most `limit` bytes."""
    stderr: bytes
    """Standard error, at most `limit` bytes."""

    def last_line(self) -> str:
        """Returns the last line of standard error that is not empty, cut to its last 500 characters; without such a
        line, returns `status`."""
        lines = self.stderr.decode(errors="replace").strip().splitlines()
        return lines[-1][-500:] if lines else self.status


class Container(Protocol):
    """A running container. All methods raise InfrastructureFault if the container or the runtime is gone."""

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

        A program that is late (status `timeout`) or prints too much (`output`) is ended. Processes started by the
        program may survive (`end_processes`).

        Args:
            argv: Program and arguments; no shell is involved.
            timeout_s: Time limit in seconds.
            stdin: Standard input.
            folder: Working folder; None for the image's own.
            variables: Environment variables, in addition to the image's.
            limit: Maximum size of standard output, and of standard error, in bytes.
        """

    def end_processes(self, timeout_s: float) -> None:
        """Kills all processes in the container except the process that keeps the container alive, within `timeout_s`
        seconds."""

    def remove(self, timeout_s: float) -> None:
        """Removes the container with its files within `timeout_s` seconds; may be called again. Raises nothing if the
        container is gone."""


class Runtime(Protocol):
    """A container runtime, such as podman, created as `cls(options)` from options accepted by `check_options`.

    Every container ends by itself after `lifetime_s` seconds, and is removed if the process that started the container
    ends, even by SIGKILL.
    """

    OPTIONS: Mapping[str, Option]
    """Options of the runtime, below `session_options`."""

    def __init__(self, options: Mapping[str, Any]) -> None: ...

    @classmethod
    def check_options(cls, options: Mapping[str, Any], key: str) -> None:
        """Raises UserError for options that are unknown, invalid, or contradict each other; `key` is the setting that
        contains them."""

    def check(self, key: str) -> None:
        """Checks that the runtime works on this machine.

        Raises:
            UserError: The program is missing, the service does not answer, or access is refused. The error names `key`,
                the setting that contains the options.
            InfrastructureFault: The program cannot be started.
        """

    def pull(self, image: str, timeout_s: float) -> None:
        """Makes the image available, and returns at once if it is.

        Raises:
            UserError: There is no such image.
            InfrastructureFault: The registry cannot be reached, or `timeout_s` seconds have passed.
        """

    def start(self, image: str, timeout_s: float) -> Container:
        """Starts a container of an available image, and returns it once commands can run.

        Raises:
            InfrastructureFault: The container does not start in `timeout_s` seconds.
        """
