"""Runs a program of this machine, such as podman or kubectl, with limits of time and output."""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from skyrl_mega.common.errors import UserError
from skyrl_mega.envs import event_loop
from skyrl_mega.envs.containers.runtime import CommandOutput
from skyrl_mega.envs.faults import InfrastructureFault

KEPT = (
    *("PATH", "HOME", "USER", "LOGNAME", "LANG", "TMPDIR", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME", "XDG_DATA_HOME"),
    *("DBUS_SESSION_BUS_ADDRESS", "SSL_CERT_FILE", "SSL_CERT_DIR", "REGISTRY_AUTH_FILE"),
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"),
    *("DOCKER_HOST", "DOCKER_CONFIG", "DOCKER_CONTEXT", "DOCKER_CERT_PATH", "DOCKER_TLS_VERIFY"),
    *("CONTAINER_HOST", "CONTAINERS_CONF", "CONTAINERS_STORAGE_CONF", "CONTAINERS_REGISTRIES_CONF"),
    *("KUBECONFIG", "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"),
    *("GOOGLE_APPLICATION_CREDENTIALS", "CLOUDSDK_CONFIG", "AZURE_CONFIG_DIR", "AWS_PROFILE", "AWS_REGION"),
    *("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE", "AWS_ROLE_ARN", "AWS_WEB_IDENTITY_TOKEN_FILE"),
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
    *("APPTAINER_CACHEDIR", "APPTAINER_TMPDIR", "APPTAINER_CONFIGDIR"),
)
"""Environment variables of this process that a client of a container runtime may read. Keys of other services, such as
trackers, are not among them."""
COMMAND_S = 60.0
"""Time limit in seconds for a command of a client that does little: listing, inspection, a signal."""
AFTER_EXIT_S = 0.5
"""Seconds for the rest of the output after the program's end. A background process may hold the pipes for longer."""


def client_variables() -> dict[str, str]:
    """Returns the environment variables for a client of a container runtime: the variables of this process in
    `KEPT`."""
    return {name: value for name, value in os.environ.items() if name in KEPT}


def refuse_missing(program: str, key: str, fix: str) -> None:
    """Checks that a program, a path or a name in `PATH`, exists on this machine.

    Raises:
        UserError: There is no such program; the error has `key`, the setting with the program, and `fix`.
    """
    if shutil.which(program) is None:
        raise UserError(f"there is no program {program} on this machine", key=key, fix=fix)


@dataclass(frozen=True)
class Client:
    """The command line of a container runtime.

    Args:
        words: The program and the arguments before a subcommand.
    """

    words: tuple[str, ...]

    def command(self, words: Sequence[str], timeout_s: float = COMMAND_S, **limits: Any) -> CommandOutput:
        """Runs the client with a subcommand, and returns status and output. A failed or late client raises nothing.

        Args:
            words: The subcommand and its arguments.
            timeout_s: Time limit in seconds.
            limits: Further arguments of `run_program`.

        Raises:
            InfrastructureFault: The client cannot be started.
        """
        return run_program([*self.words, *words], timeout_s, **limits)


def run_program(
    argv: Sequence[str],
    timeout_s: float,
    *,
    stdin: bytes = b"",
    limit: int = 2**24,
    variables: Mapping[str, str] | None = None,
    cancellable: bool = False,
) -> CommandOutput:
    """Runs a program to its end and returns the output. Kills the program's process group if the program is late or
    prints too much; both give a status and raise nothing.

    Args:
        argv: Program and arguments; no shell is involved. The working folder is `/`.
        timeout_s: Time limit in seconds.
        stdin: Standard input.
        limit: Maximum size of standard output, and of standard error, in bytes.
        variables: Environment variables, in addition to `client_variables`.
        cancellable: True to kill the program if the run gives up on the environment's step (`event_loop.on_cancel`).

    Returns:
        Status, exit code and output. Status `timeout` for a late program, `output` for too much output. The exit code
        is None if a signal ended the program. If the run gave up, the status is `failed` without an exit code.

    Raises:
        InfrastructureFault: The program cannot be started.
    """
    deadline = time.monotonic() + timeout_s
    try:
        process = subprocess.Popen(
            list(argv),
            stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd="/",
            env={**client_variables(), **(variables or {})},
            start_new_session=True,
        )
    except OSError as error:
        raise InfrastructureFault(f"{argv[0]} cannot be started: {error.strerror}") from error

    def kill() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the leader is reaped below, so the id is not used again

    streams = _Streams(process, stdin, limit)
    try:
        with event_loop.on_cancel(kill) if cancellable else nullcontext():
            ended = streams.copy(deadline)
    finally:
        if process.poll() is None:
            kill()
        streams.close()
        process.wait()
    code = process.returncode if process.returncode >= 0 and ended is None else None
    status = ended or ("ok" if process.returncode == 0 else "failed")
    return CommandOutput(status, code, streams.text("stdout"), streams.text("stderr"))


class _Streams:
    """The three streams of a process, and the process' end."""

    def __init__(self, process: subprocess.Popen[bytes], stdin: bytes, limit: int) -> None:
        self._process, self._unsent, self._limit = process, memoryview(stdin), limit
        self._pieces: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
        self._sizes = {"stdout": 0, "stderr": 0}
        self._exited = os.pidfd_open(process.pid)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._exited, selectors.EVENT_READ, "exited")
        for name, file in (("stdout", process.stdout), ("stderr", process.stderr)):
            assert file is not None
            os.set_blocking(file.fileno(), False)
            self._selector.register(file, selectors.EVENT_READ, name)
        if process.stdin is not None:
            os.set_blocking(process.stdin.fileno(), False)
            self._selector.register(process.stdin, selectors.EVENT_WRITE, "stdin")

    def copy(self, deadline: float) -> str | None:
        """Copies until both outputs end, or shortly after the end of the process. Returns None, or the reason for an
        earlier end: `timeout` or `output`."""
        exited = False
        while not exited or self._registered() & {"stdout", "stderr"}:
            events = self._selector.select(max(0.0, deadline - time.monotonic()))
            if time.monotonic() >= deadline and not (exited and events):
                return None if exited else "timeout"
            for key, _ in events:
                if key.data == "exited":
                    exited = True
                    self._selector.unregister(key.fileobj)
                    deadline = min(deadline, time.monotonic() + AFTER_EXIT_S)
                elif key.data == "stdin":
                    self._send()
                elif not self._receive(key.data, key.fd):
                    self._selector.unregister(key.fileobj)
            if max(self._sizes.values()) > self._limit:
                return "output"
        return None

    def _registered(self) -> set[str]:
        return {key.data for key in self._selector.get_map().values()}

    def _send(self) -> None:
        stream = self._process.stdin
        assert stream is not None
        try:
            self._unsent = self._unsent[os.write(stream.fileno(), self._unsent[:65536]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:  # the program does not read all of its input
            self._unsent = self._unsent[:0]
        if not self._unsent:
            self._selector.unregister(stream)
            stream.close()

    def _receive(self, name: str, fd: int) -> bool:
        piece = os.read(fd, 65536)
        self._pieces[name].append(piece[: max(0, self._limit - self._sizes[name])])
        self._sizes[name] += len(piece)
        return bool(piece)

    def text(self, name: str) -> bytes:
        """Returns the output received so far, at most the limit."""
        return b"".join(self._pieces[name])

    def close(self) -> None:
        """Closes all streams."""
        self._selector.close()
        os.close(self._exited)
        for file in (self._process.stdin, self._process.stdout, self._process.stderr):
            if file is not None and not file.closed:
                with contextlib.suppress(BrokenPipeError):
                    file.close()
