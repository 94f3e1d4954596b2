"""Containers of Apptainer: instances, for clusters without podman or docker."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from skyrl_mega.common.errors import UserError
from skyrl_mega.envs.containers import owner, sif
from skyrl_mega.envs.containers.inside import KILL_ALL
from skyrl_mega.envs.containers.program import COMMAND_S, Client, client_variables, refuse_missing
from skyrl_mega.envs.containers.runtime import CommandOutput
from skyrl_mega.envs.faults import InfrastructureFault
from skyrl_mega.envs.options import Option, filled, number, switch, text, texts, whole

FAILED = 255
"""Exit code of the client after its own failure."""
FATAL = re.compile(rb"^(?:\x1b\[[0-9;]*m)?FATAL:", re.MULTILINE)
"""Error of the client in standard error, which a program in the container can imitate."""
ENTER = 'cd -- "$0" || exit 126; exec "$@"'
"""Script that runs a program in a folder. Images lose their working folder in a SIF file."""
LIMITS = {"memory_mib": ("--memory", "m"), "cpus": ("--cpus", ""), "processes": ("--pids-limit", "")}
"""Option → argument of the client, and the value's ending."""
BUS = ("XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS")
"""Variables by which a plain user's client reaches systemd, which makes the cgroup."""


class Apptainer:
    """Instances of Apptainer, a named instance per container. `options` follow `OPTIONS`; options with a default may be
    missing."""

    OPTIONS: ClassVar[Mapping[str, Option]] = {
        "program": text("apptainer", "path of the client"),
        "arguments": texts([], "further arguments of `instance start`"),
        "folder": text(None, "folder of pulled images, on a file system of all nodes; null for .sif files only"),
        "fakeroot": switch(True, "root in the container, without rights outside"),
        "network": text("none", "network of a container, as of --network; host for the machine's own"),
        "memory_mib": whole(0, "memory of a container, without fakeroot; 0 for no limit", low=0),
        "cpus": number(0.0, "CPUs of a container, without fakeroot; 0 for no limit", low=0, high=4096),
        "processes": whole(0, "processes of a container, without fakeroot; 0 for no limit", low=0),
        "disk_mib": whole(
            0, "a container's own files, in a file in `scratch`; 0: in memory, of the site's size", low=0
        ),
        "scratch": text("/tmp", "folder on this machine for disk_mib"),
        "lifetime_s": whole(7200, "seconds after which a container is ended", low=10, high=30 * 86400),
    }

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = filled("apptainer", options, self.OPTIONS)
        self.client = Client((self.options["program"],))

    @classmethod
    def check_options(cls, options: Mapping[str, Any], key: str) -> None:
        """Raises UserError for unknown or invalid options, limits beside `fakeroot`, and relative folders.

        Args:
            options: Options of the runtime; options with a default may be missing.
            key: Setting that contains the options, for errors.
        """
        complete = filled(key, options, cls.OPTIONS)
        for name in LIMITS:
            if complete["fakeroot"] and complete[name]:
                raise UserError(
                    "apptainer sets no limit beside fakeroot",
                    key=f"{key}.{name}",
                    value=complete[name],
                    fix=f"give {key}.fakeroot=false, or {key}.{name}=0 and the limits of the job",
                )
        for name in ("folder", "scratch"):
            if complete[name] is not None and not os.path.isabs(complete[name]):
                raise UserError("allowed is an absolute path", key=f"{key}.{name}", value=complete[name])

    def check(self, key: str) -> None:
        """Checks that the client and the folders work on this machine.

        Args:
            key: Setting that contains the options, for errors.

        Raises:
            UserError: The client is missing or fails, a folder cannot be written to, or limits need a session of
                systemd.
            InfrastructureFault: The client cannot be started.
        """
        fix = "install apptainer on every node that runs environments, or give the program's path"
        refuse_missing(self.client.words[0], f"{key}.program", fix)
        ran = self.client.command(["--version"])
        if ran.status != "ok":
            raise UserError(f"`{self.client.words[0]} --version` fails: {ran.last_line()}", key=f"{key}.program")
        for name in ("folder", *(["scratch"] if self.options["disk_mib"] else [])):
            place = self.options[name]
            if place is not None and not os.access(place, os.W_OK | os.X_OK):
                raise UserError("this user cannot write there", key=f"{key}.{name}", value=place, fix="make the folder")
        limited = [name for name in LIMITS if self.options[name]]
        if limited and os.geteuid() != 0 and not all(os.environ.get(name) for name in BUS):
            raise UserError(
                f"a plain user's limits need systemd, but {' or '.join(BUS)} is not set",
                key=f"{key}.{limited[0]}",
                value=self.options[limited[0]],
                fix=f"run in a session of systemd with delegated cgroups, or give {key}.{limited[0]}=0",
            )

    def pull(self, image: str, timeout_s: float) -> None:
        """Pulls the image into a file of `folder` within `timeout_s` seconds, and returns at once if the file exists.

        Raises:
            UserError: There is no such image or file, its registry refuses access, or the image is not a .sif file and
                no `folder` is given.
            InfrastructureFault: The registry cannot be reached, or the time limit has passed.
        """

        def pull(file: Path, address: str, seconds: float) -> CommandOutput:
            return self.client.command(["pull", "--force", str(file), address], seconds)

        sif.make_available(image, sif.path_of(image, self.options["folder"]), pull, timeout_s)

    def start(self, image: str, timeout_s: float) -> ApptainerContainer:
        """Starts an instance of an image, and returns the instance once commands can run in it. An instance that fails
        is removed.

        The first call also starts the reaper, a process that removes this process's instances after its end.

        Raises:
            UserError: The image is not a .sif file, and the option `folder` is not set.
            InfrastructureFault: The instance does not start within `timeout_s` seconds, or the reaper does not start.
        """
        deadline = time.monotonic() + timeout_s
        names = f"{owner.PREFIX}-{owner.owner()}-"
        client = shlex.join(self.client.words)
        # the table of instances has a line of titles
        listing = f"table=$({client} instance list '{names}*') || exit 1; echo \"$table\" | sed 1d | cut -d ' ' -f 1"
        owner.start_reaper(["sh", "-c", listing], ["sh", "-c", f"for name; do {self._stop('$name')}; done", "stop"])
        container = ApptainerContainer(self, names + secrets.token_hex(6))
        with contextlib.ExitStack() as undo:
            undo.callback(container.remove, COMMAND_S)
            ran = self._start(container.name, sif.path_of(image, self.options["folder"]), timeout_s)
            if ran.status == "ok":
                ran = container.execute(["true"], max(1.0, deadline - time.monotonic()))
            if ran.status != "ok":
                raise InfrastructureFault(f"no instance of {image} starts: {ran.last_line()}")
            container.limit_lifetime()
            undo.pop_all()
        return container

    def _start(self, name: str, file: Path, timeout_s: float) -> CommandOutput:
        chosen = self.options
        words = ["--containall", "--cleanenv", "--no-mount=home,tmp,bind-paths"]
        words += ["--fakeroot"] if chosen["fakeroot"] else ["--no-privs"]
        words += ["--net", f"--network={chosen['network']}"] if chosen["network"] != "host" else []
        words += [f"{argument}={chosen[key]}{unit}" for key, (argument, unit) in LIMITS.items() if chosen[key]]
        if chosen["disk_mib"]:
            disk = ["overlay", "create", f"--size={chosen['disk_mib']}", "--sparse"]
            ran = self.client.command(
                [*disk, *(["--fakeroot"] if chosen["fakeroot"] else []), self.disk(name)], timeout_s
            )
            if ran.status != "ok":
                return ran
            words.append(f"--overlay={self.disk(name)}")
        else:
            words.append("--writable-tmpfs")
        return self.client.command(["instance", "start", *words, *chosen["arguments"], str(file), name], timeout_s)

    def disk(self, name: str) -> str:
        """Returns the path, below `scratch`, of the file with the own files of the instance `name`; used with
        `disk_mib` only."""
        return f"{self.options['scratch']}/{name}.img"

    def _stop(self, name: str) -> str:
        """Returns a shell command that stops an instance and removes its files; `name` may be a variable."""
        disk = f'; rm -f "{self.disk(name)}"' if self.options["disk_mib"] else ""
        return f'{shlex.join(self.client.words)} instance stop --signal=KILL --timeout=10 "{name}"{disk}'

    def stop_words(self, name: str) -> list[str]:
        """Returns program and arguments of a command that kills the instance `name`, and removes the file `disk` of the
        instance."""
        return ["sh", "-c", self._stop(name)]


class ApptainerContainer:
    """A running instance. The policy's processes cannot end it; its end raises InfrastructureFault."""

    def __init__(self, runtime: Apptainer, name: str) -> None:
        self.runtime, self.name = runtime, name
        self._timer: subprocess.Popen[bytes] | None = None

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
        """Runs a program in the instance, waits for its end, and returns status, exit code and output.

        A program that is late (status `timeout`) or prints too much (`output`) is killed with all other processes of
        the instance. A program that cannot be started gives the status `failed`.

        Args:
            argv: Program and arguments; no shell is involved.
            timeout_s: Time limit in seconds.
            stdin: Standard input.
            folder: Working folder; None for `/`.
            variables: Environment variables, in addition to the image's.
            limit: Maximum size of standard output, and of standard error, in bytes.

        Raises:
            InfrastructureFault: The instance has ended, or the client does not work or was killed, as when the run
                gives up on the environment's step.
        """
        # the client passes on variables with this prefix; as arguments they would stand in process lists
        given = {f"APPTAINERENV_{name}": value for name, value in (variables or {}).items()}
        words = ["sh", "-c", ENTER, folder or "/", *argv]
        ran = self.execute(words, timeout_s, stdin=stdin, limit=limit, variables=given, cancellable=True)
        if ran.status in ("timeout", "output"):
            self.end_processes(COMMAND_S)
        elif ran.exit == FAILED and FATAL.search(ran.stderr):
            self._refuse_ended(ran)
        elif ran.exit is None:
            raise InfrastructureFault(f"{self.runtime.client.words[0]} was killed")
        return ran

    def end_processes(self, timeout_s: float) -> None:
        """Kills all processes in the instance except process 1, within `timeout_s` seconds. If the policy has replaced
        the shell, or leaves no space for another process, processes stay until the instance's end.

        Raises:
            InfrastructureFault: The instance has ended, or the client does not work.
        """
        ran = self.execute(["sh", "-c", KILL_ALL], timeout_s)
        if ran.status != "ok":
            self._refuse_ended(ran)

    def remove(self, timeout_s: float) -> None:
        """Stops the instance and removes its files; may be called again. Raises nothing if the instance is gone.

        Raises:
            InfrastructureFault: The instance cannot be stopped in `timeout_s` seconds.
            OSError: The file `disk` cannot be removed.
        """
        if self._timer is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._timer.pid, signal.SIGKILL)
            self._timer.wait()
            self._timer = None
        ran = self.runtime.client.command(["instance", "stop", "--signal=KILL", "--timeout=10", self.name], timeout_s)
        if self.runtime.options["disk_mib"]:
            Path(self.runtime.disk(self.name)).unlink(missing_ok=True)
        if ran.status != "ok" and b"no instance found" not in ran.stderr:
            raise InfrastructureFault(f"the instance {self.name} cannot be stopped: {ran.last_line()}")

    def execute(self, words: Sequence[str], timeout_s: float, **limits: Any) -> CommandOutput:
        """Runs a program in the instance by the client's `exec`, and returns the client's result unchanged.

        An ended instance raises nothing here. The result is then `failed` with the exit code `FAILED`, as after any
        failure of the client, or of a program with this exit code; `run` tells these apart.

        Args:
            words: Program and arguments.
            timeout_s: Time limit in seconds.
            limits: Further arguments of `run_program`.

        Raises:
            InfrastructureFault: The client cannot be started.
        """
        return self.runtime.client.command(
            ["exec", "--cleanenv", f"instance://{self.name}", *words], timeout_s, **limits
        )

    def limit_lifetime(self) -> None:
        """Starts a process that stops the instance after `lifetime_s`, also if this process and the reaper are dead."""
        stop = 'sleep "$0"; exec "$@"'
        words = ["sh", "-c", stop, str(self.runtime.options["lifetime_s"]), *self.runtime.stop_words(self.name)]
        null = subprocess.DEVNULL
        self._timer = subprocess.Popen(
            words, stdin=null, stdout=null, stderr=null, cwd="/", env=client_variables(), start_new_session=True
        )

    def _refuse_ended(self, ran: CommandOutput) -> None:
        """Raises InfrastructureFault if the instance has ended."""
        listed = self.runtime.client.command(["instance", "list", self.name])
        if listed.status != "ok" or self.name.encode() not in listed.stdout:
            raise InfrastructureFault(f"the instance {self.name} is lost: {ran.last_line()}")
