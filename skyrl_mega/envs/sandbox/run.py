"""Host side of the sandbox: runs a command in the jail."""

from __future__ import annotations

import functools
import json
import os
import secrets
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_type_hints

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.sandboxes import SANDBOX_DISK_MIB, SANDBOX_MEMORY_MIB, default_total_mib, machine_mib
from skyrl_mega.envs import event_loop
from skyrl_mega.envs.faults import InfrastructureFault
from skyrl_mega.envs.options import Option, filled, number, texts, whole
from skyrl_mega.envs.sandbox import budget, folders, interpreter, tree, variables
from skyrl_mega.envs.sandbox.guarantees import CONFINEMENTS, missing_text
from skyrl_mega.envs.sandbox.listen import SandboxListener
from skyrl_mega.envs.sandbox.workspace import Workspace, inodes

JAIL = Path(__file__).with_name("jail.py")
MOST = 10**6
"""Upper bound of every limit: a million seconds, MiB, processes."""
KILLED = (None, -signal.SIGKILL, 128 + signal.SIGKILL)
"""Exit codes of a command after the kernel killed a process; a shell reports 128 + SIGKILL for a killed child."""
GRACE_S = 10.0
"""Seconds for the jail to report after its time is up."""

MECHANISMS = ("namespaces", "landlock", "seccomp")
"""Values of `Sandbox.disabled`."""


@dataclass(frozen=True)
class CommandLimits:
    """Resource limits of one command."""

    wall_s: float = 10.0
    """Seconds from start to end."""
    cpu_s: int = 10
    """CPU seconds of each process."""
    memory_mib: int = SANDBOX_MEMORY_MIB
    """Address space of each process, in MiB."""
    total_mib: int = default_total_mib(machine_mib())
    """Memory of all commands that run at once for this environment, in MiB."""
    processes: int = 16
    """Number of processes and threads at once."""
    file_mib: int = 16
    """Size of the largest file, in MiB."""
    disk_mib: int = SANDBOX_DISK_MIB
    """Size of the working folder, in MiB."""
    open_files: int = 128
    """Number of open files of each process."""
    output_kib: int = 256
    """Size of stdout and stderr together, in KiB; a command that prints more is ended."""


PID_NAMESPACE = "PID namespace"
"""Name of this mechanism in `SandboxResult.active`."""


@dataclass(frozen=True)
class SandboxResult:
    """Result of a command. All processes of the command are dead."""

    status: str
    """`ok`: exit code 0. `failed`: another exit code, or a signal. `timeout`: too much wall-clock or CPU time.
    `output`: too much printed. `disk`: too much written. `memory`: the largest command when all concurrent commands
    together used too much.
    """
    exit: int | None
    """Exit code; −N for signal N; None if the command was ended from outside or killed its own init."""
    stdout: str
    stderr: str
    """Printed text; invalid UTF-8 is replaced. Cut after `output_kib` in total."""
    seconds: float
    """Wall-clock time."""
    active: Mapping[str, Sequence[str]]
    """Kind of confinement, such as memory → names of the kernel's mechanisms in use for this kind."""


@dataclass(frozen=True)
class Sandbox:
    """Settings for running untrusted code.

    Args:
        limits: Resource limits of one command.
        without: Confinements waived if the machine lacks them; keys of `CONFINEMENTS`.
        read: Additional readable files and folders, at their own paths.
        disabled: Mechanisms not used (`namespaces`, `landlock`, `seccomp`), as on a machine without them.
        name: Name of the shared budget: commands of all sandboxes of one name share `total_mib`.
        confined: False runs commands as plain processes of this user, without confinements and limits besides the time
            and the output. All their processes still end with the command, or with this process.
    """

    limits: CommandLimits = CommandLimits()
    without: tuple[str, ...] = ()
    read: tuple[str, ...] = ()
    disabled: tuple[str, ...] = ()
    name: str = "sandbox"
    confined: bool = True

    @classmethod
    def from_options(cls, options: Mapping[str, Any] | None, key: str, default: CommandLimits | None = None) -> Sandbox:
        """Returns a sandbox with the limits and waived confinements of a setting; `settings` declares the options.

        Args:
            options: `environment.options.<name>.sandbox`.
            key: Name of the setting, for errors.
            default: Limits used for missing settings; None: `CommandLimits()`.

        Raises:
            UserError: A setting does not exist, or a value is not allowed.
        """
        values = filled(key, options, settings(default or CommandLimits()))
        without = tuple(values.pop("without"))
        return cls(CommandLimits(**values), without, name=key)

    def check(self, key: str = "sandbox") -> None:
        """Checks the confinements and limits by running an empty program on this machine. Returns None. Not for a
        sandbox with `confined` False: confinements are demanded here all the same.

        Args:
            key: Name of the sandbox's setting, for errors.

        Raises:
            UserError: A confinement not named in `without` is missing, the interpreter is unreachable inside, or the
                limits are too small.
            InfrastructureFault: The trial of the confinements does not start.
        """
        missing = [
            name for name in CONFINEMENTS if name not in confinements(self.disabled) and name not in self.without
        ]
        if missing:
            raise UserError(missing_text(missing, key))
        try:
            outcome = self.run(python("-c", "pass"))
        except RuntimeError as error:
            raise UserError(
                error, key=key, fix="let other users read and execute this interpreter, or allow user namespaces"
            ) from error
        if outcome.status != "ok":
            detail = outcome.stderr.strip().rpartition("\n")[2][-200:] or f"exit code {outcome.exit}"
            raise UserError(
                f"under its limits not even an empty Python program runs ({outcome.status}: "
                f"{detail}); allowed are limits as usual or wider: {_usual()}",
                key=key,
            )

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: str = "",
        files: Mapping[str, str] | None = None,
        workspace: Workspace | None = None,
        limits: CommandLimits | None = None,
        environment: Mapping[str, str | Path] | None = None,
        serve: Callable[[socket.socket], None] | None = None,
    ) -> SandboxResult:
        """Runs a command and waits for its end; all its processes are dead on return. A failed command, or one ended by
        a limit, is not an error: see `SandboxResult.status`. If the run gives up on the environment's step meanwhile,
        the command is killed, with the status `failed`.

        Args:
            argv: Absolute path of the program, and its arguments.
            stdin: The whole standard input.
            files: Relative path → text, written into the working folder first.
            workspace: Working folder, kept afterwards; without a workspace, the working folder is empty and deleted
                afterwards.
            limits: Limits replacing the sandbox's own.
            environment: Further environment variables; a relative `Path` names a file of the working folder, and the
                command receives the absolute path.
            serve: Receives a socket that listens on `listen.HOST` and `listen.PORT` in the network namespace of the
                command, which may then open sockets and reaches only this address. Without a network namespace, and
                unconfined, `serve` is not called, and the command has the network of this process.

        Raises:
            UserError: The machine lacks an isolation feature that the sandbox requires.
            InfrastructureFault: The command cannot be started, or the jail around it was killed.
        """
        limits = limits or self.limits
        scratch = folders.make()
        try:
            request = _request(self, argv, stdin, files or {}, workspace, limits=limits, scratch=scratch)
            for name, value in (environment or {}).items():
                request["paths" if isinstance(value, Path) else "env"][name] = str(value)
            listener = SandboxListener(serve) if serve is not None and self.confined else None
            request["sockets"] = listener is not None
            with closing(listener) if listener is not None else nullcontext():
                return _execute(request, limits, budget.shared(self.name, limits.total_mib), listener)
        finally:
            tree.remove(scratch)

    def workspace(self) -> Workspace:
        """Creates and returns a folder that keeps files between commands; `disk_mib` limits the content. The caller
        closes the workspace. Raises OSError if the folder cannot be created."""
        return Workspace(_bytes(self.limits.disk_mib), self.confined and "namespaces" not in self.disabled)


def settings(default: CommandLimits) -> dict[str, Option]:
    """Returns the declarations of a sandbox's options: `without`, and each limit with the default in `default`."""
    kinds = get_type_hints(CommandLimits)
    limits = {
        name: (whole(usual, "", low=1, high=MOST) if kinds[name] is int else number(usual, "", above=0, high=MOST))
        for name, usual in asdict(default).items()
    }
    return {"without": texts([], "confinements done without", choices=tuple(CONFINEMENTS)), **limits}


def _usual() -> str:
    return ", ".join(f"{name}={value:g}" for name, value in asdict(CommandLimits()).items())


def python(script: str = "main.py", *arguments: str) -> list[str]:
    """Returns the command line for a script of the working folder, run isolated with this interpreter."""
    return [os.path.abspath(sys.executable), "-I", "-B", "-X", "utf8", script, *arguments]


@functools.cache
def confinements(disabled: tuple[str, ...] = ()) -> dict[str, list[str]]:
    """Returns confinement → mechanisms, for the confinements possible on this machine; others have no key. A trial in
    the first call decides; later calls return the same result.

    Args:
        disabled: Mechanisms not to use, for tests.

    Raises:
        InfrastructureFault: The trial does not start.
    """
    box = Sandbox(without=tuple(CONFINEMENTS), disabled=disabled)
    return {name: list(mechanisms) for name, mechanisms in box.run([]).active.items()}


def _request(
    box: Sandbox,
    argv: Sequence[str],
    stdin: str,
    files: Mapping[str, str],
    workspace: Workspace | None,
    *,
    limits: CommandLimits,
    scratch: str,
) -> dict[str, Any]:
    own_uid = secrets.randbelow(1 << 24) + 2_000_000_000  # unique, so the process limit applies to this command alone
    return {
        "argv": list(argv),
        "env": variables.inside() if box.confined else variables.of_this_user(),
        "paths": {},
        "stdin": stdin,
        "files": dict(files),
        "folder": workspace.place if workspace is not None else None,
        "namespaces": dict(workspace.namespaces) if workspace is not None else {},
        "scratch": _make_folder(scratch, "work"),
        "root": _make_folder(scratch, "root"),
        "read": sorted({*interpreter.paths_of_this(), *box.read}),
        "need": [name for name in CONFINEMENTS if name not in box.without] if box.confined else [],
        "disabled": list(box.disabled) if box.confined else list(MECHANISMS),
        "confined": box.confined,
        "uid": own_uid if workspace is None else _owner(workspace.folder, own_uid),
        "limits": {
            "cpu": int(limits.cpu_s),
            "memory": _bytes(limits.memory_mib),
            "processes": int(limits.processes),
            "file": _bytes(limits.file_mib),
            "disk": _bytes(limits.disk_mib),
            "inodes": inodes(_bytes(limits.disk_mib)),
            "open_files": int(limits.open_files),
        },
    }


def _bytes(mib: float) -> int:
    return int(mib * 2**20)


def _make_folder(scratch: str, name: str) -> str:
    path = os.path.join(scratch, name)
    os.mkdir(path, 0o700)
    return path


def _owner(folder: Path, fresh: int) -> int:
    """Returns the user owning a kept folder since its first command, or `fresh` for a new folder."""
    uid = folder.stat().st_uid
    return uid if uid >= 2_000_000_000 else fresh


def _execute(
    request: dict[str, Any], limits: CommandLimits, shared: budget.Budget, listener: SandboxListener | None
) -> SandboxResult:
    group = shared.group if request["confined"] else None
    request["group"] = str(group / "cgroup.procs") if group is not None else None
    request["channel"] = listener.there.fileno() if listener is not None else None
    reading, writing = os.pipe()
    start, killed = time.monotonic(), shared.killed()
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(JAIL), str(writing)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[
                writing,
                *request["namespaces"].values(),
                *([request["channel"]] if listener is not None else []),
            ],
            cwd="/",
            env={"LANG": "C.UTF-8"},
        )
    except BaseException as error:
        os.close(reading)
        if isinstance(error, OSError):  # out of processes or memory
            raise InfrastructureFault(f"the sandbox does not start: {error}") from error
        raise
    finally:
        os.close(writing)
        if listener is not None:
            listener.there.close()
    assert process.stdin and process.stdout and process.stderr
    with process, os.fdopen(reading, "rb") as report:
        data = json.dumps(request).encode()
        try:
            process.stdin.write(struct.pack("Q", len(data)) + data)
            process.stdin.flush()
        except BrokenPipeError as error:
            raise InfrastructureFault("the sandbox was killed as it started") from error
        try:
            too_much = functools.partial(shared.note, process)
            with event_loop.on_cancel(process.stdin.close):  # the launcher then kills everything
                ended, pieces = _collect(process, report.fileno(), limits, start, too_much, listener)
        finally:
            shared.forget(process)
    *_, last = b"".join(pieces["report"]).splitlines() or [b"{}"]
    reported = json.loads(last)
    if "active" not in reported:
        errors = b"".join(pieces["stderr"]).decode(errors="replace").strip()
        raise InfrastructureFault(f"the sandbox did not report: {errors[-500:]}")
    if ended is None and reported.get("exit") in KILLED and shared.killed() > killed:
        ended = "memory"
    if ended == "memory":
        shared.count()
    return _outcome(request, limits, reported, ended, pieces, time.monotonic() - start)


def _collect(
    process: subprocess.Popen[bytes],
    report: int,
    limits: CommandLimits,
    start: float,
    too_much: Callable[[int], bool],
    listener: SandboxListener | None,
) -> tuple[str | None, dict[str, list[bytes]]]:
    """Reads all three streams to the end; ends the jail at the deadline, or if the command prints or holds too much.
    Returns the reason of an early end, or None, and the pieces of each stream.
    """
    assert process.stdin and process.stdout and process.stderr
    pieces: dict[str, list[bytes]] = {"stdout": [], "stderr": [], "report": []}
    remaining, ended, deadline = int(limits.output_kib * 1024), None, start + limits.wall_s
    with selectors.DefaultSelector() as streams:
        for fd, name in ((process.stdout.fileno(), "stdout"), (process.stderr.fileno(), "stderr"), (report, "report")):
            streams.register(fd, selectors.EVENT_READ, name)
        if listener is not None:
            streams.register(listener.fileno(), selectors.EVENT_READ, "listener")
        while streams.get_map():
            events = streams.select(max(0.0, deadline - time.monotonic()))
            for key, _ in events:
                if listener is not None and key.data == "listener":
                    if not listener.receive():
                        streams.unregister(key.fd)
                    continue
                piece = os.read(key.fd, 65536)
                if not piece:
                    streams.unregister(key.fd)
                elif key.data == "report":
                    pieces["report"].append(piece)
                    if ended is None and any(map(too_much, _memory(piece))):
                        ended = "memory"
                else:
                    pieces[key.data].append(piece[: max(0, remaining)])
                    remaining -= len(piece)
            if remaining < 0 and ended is None:
                ended = "output"
            elif time.monotonic() >= deadline:
                if ended is not None:
                    process.kill()  # grace period over; init and everything inside die too
                    break
                ended = "timeout"
            if ended is not None and not process.stdin.closed:
                process.stdin.close()
                deadline = time.monotonic() + GRACE_S
    return ended, pieces


def _memory(piece: bytes) -> Iterator[int]:
    """Yields the bytes of memory in the complete lines of a report; each line is written at once."""
    for line in piece.splitlines():
        if line.startswith(b'{"memory": '):
            yield json.loads(line)["memory"]


def _outcome(
    request: dict[str, Any],
    limits: CommandLimits,
    report: dict[str, Any],
    ended: str | None,
    pieces: dict[str, list[bytes]],
    seconds: float,
) -> SandboxResult:
    if "missing" in report:
        raise UserError(missing_text(report["missing"], "sandbox"))
    if "broken" in report:
        raise InfrastructureFault(f"the sandbox cannot start {request['argv'][:1]}: {report['broken']}")
    code = report.get("exit")
    isolated = PID_NAMESPACE in report["active"].get("processes", ())
    if request["argv"] and code is None and ended is None and report["stopped"] is None and isolated:
        raise InfrastructureFault("the sandbox was killed from outside")  # no process inside can kill init
    if ended is None and report["stopped"] == "disk":
        ended = "disk"
    elif ended is None and code in (-signal.SIGXCPU, -signal.SIGKILL) and report["cpu_seconds"] > limits.cpu_s - 0.5:
        ended = "timeout"
    stdout, stderr = (b"".join(pieces[name]).decode(errors="replace") for name in ("stdout", "stderr"))
    status = ended or ("ok" if code == 0 else "failed")  # code is None if the command killed its own init
    return SandboxResult(status, code, stdout, stderr, report.get("seconds", seconds), report["active"])
