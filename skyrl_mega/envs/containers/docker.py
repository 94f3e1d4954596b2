"""Containers of podman and docker, by their command lines."""

from __future__ import annotations

import json
import re
import secrets
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from skyrl_mega.common.errors import UserError
from skyrl_mega.common.secret_names import names_secret
from skyrl_mega.envs.containers import images, owner
from skyrl_mega.envs.containers.program import client_variables, run_program
from skyrl_mega.envs.containers.runtime import CommandOutput
from skyrl_mega.envs.faults import InfrastructureFault
from skyrl_mega.envs.options import Option, filled, number, text, texts, whole

CAPABILITIES = ["CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID"]
"""Capabilities of root in a container: owners and modes of files, other users, signals. Tests and package managers need
these; none reaches outside the container."""
RESERVED = ("--rm", "--name", "--label", "--entrypoint", "--detach", "-d", "--pull", "--restart")
"""Arguments of `run` that this runtime sets itself."""
PROCESS_1 = """\
while now=$(date +%s) || now=0; [ "$now" -lt {end} ]; do
  if [ "$now" = 0 ]; then sleep 1 & else sleep $(({end} - now)) & fi
  wait $!
done
exit 3"""
"""Process 1 of a container: collects ended processes and ends at a time in seconds since 1970. The loop survives the
SIGKILL of its children."""
COMMAND_S = 60.0
"""Time limit in seconds for a command of the client that does little: listing, inspection, a signal."""
SIGKILLED = 137
"""Exit code of a container, or of a command in a container, that was ended by SIGKILL."""
ERROR = re.compile(rb"^(?:Error: |Error response from daemon|OCI runtime|Cannot connect|error during connect)", re.M)
"""Error of the client in standard error, which a program in the container can imitate."""
UNKNOWN_IMAGE = re.compile(rb"image not known|no such image|no such object", re.I)
"""Error of `image inspect` for an image that is not on this machine."""
LONGEST_ARGUMENTS = 120_000
"""Maximum length of all arguments of a command, in bytes; the kernel refuses an argument of 128 KiB."""


class CommandLineRuntime:
    """Podman or docker, by the command line of its client."""

    PROGRAM: ClassVar[str]
    """Name of the client."""
    FLAGS: ClassVar[tuple[str, ...]] = ()
    """Arguments of `run` that only this client knows."""
    OPTIONS: ClassVar[Mapping[str, Option]] = {
        "program": text(None, "path of the client; null for the name of the runtime, found in PATH"),
        "global_arguments": texts([], "arguments before the client's subcommand, such as --root=FOLDER"),
        "arguments": texts([], "further arguments of `run`"),
        "network": text("none", "network of a container, as of --network"),
        "memory_mib": whole(4096, "memory of a container; 0 for no limit", low=0),
        "cpus": number(2.0, "CPUs of a container; 0 for no limit", low=0, high=4096),
        "processes": whole(512, "processes and threads of a container at once; 0 for no limit", low=0),
        "disk_gib": whole(
            0, "size of a container's own files, where the storage supports quotas; 0 for no limit", low=0
        ),
        "images_gib": whole(0, "disk for pulled images, the least recently used are removed; 0 for no limit", low=0),
        "user": text(None, "user of commands; null for the image's"),
        "capabilities": texts(CAPABILITIES, "capabilities of root in a container"),
        "lifetime_s": whole(7200, "seconds after which a container ends by itself", low=10, high=30 * 86400),
    }

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = filled(self.PROGRAM, options, self.OPTIONS)
        self.client = [self.options["program"] or self.PROGRAM, *self.options["global_arguments"]]

    @classmethod
    def check_options(cls, options: Mapping[str, Any], key: str) -> None:
        """Raises UserError for further arguments that the runtime sets itself."""
        for word in filled(key, options, cls.OPTIONS)["arguments"]:
            if word.partition("=")[0] in RESERVED:
                raise UserError(
                    "the runtime sets this argument itself", key=f"{key}.arguments", value=word, fix="leave it out"
                )

    def check(self, key: str) -> None:
        """Checks that the client exists and that podman, or docker's daemon, answers.

        Raises:
            UserError: The client is missing, does not answer, or cannot limit the resources of containers here.
        """
        if shutil.which(self.client[0]) is None:
            raise UserError(
                f"there is no program {self.client[0]}",
                key=f"{key}.program",
                fix=f"install {self.PROGRAM}, or give the path of the program",
            )
        ran = run_program([*self.client, "info", "--format", "{{json .}}"], COMMAND_S)
        try:
            facts = json.loads(ran.stdout) if ran.status == "ok" else None
        except ValueError:
            facts = None
        if not isinstance(facts, dict) or facts.get("ServerErrors"):
            raise UserError(
                f"`{' '.join(self.client)} info` fails: {_last_line(ran) or ran.status}",
                key=key,
                fix="make this command work for the user of this process, on every node that runs environments",
            )
        self._check_limits(facts, key)

    def _check_limits(self, facts: Mapping[str, Any], key: str) -> None:
        """Refuses limits that podman cannot set for a plain user, as in cgroup v1."""
        host = facts.get("host", {})
        rootless = host.get("security", {}).get("rootless", False)
        available = set(host.get("cgroupControllers") or ()) if host.get("cgroupVersion") == "v2" else set()
        for name, controller in (("memory_mib", "memory"), ("cpus", "cpu"), ("processes", "pids")):
            if rootless and self.options[name] and controller not in available:
                raise UserError(
                    f"podman may not limit {controller} for a plain user here",
                    key=f"{key}.{name}",
                    value=self.options[name],
                    fix=f"delegate the cgroup controller {controller} to the user, or set {key}.{name}=0",
                )

    def pull(self, image: str, timeout_s: float) -> None:
        """Makes the image available, and returns at once if it is.

        Raises:
            UserError: There is no such image.
            InfrastructureFault: The registry cannot be reached, or the time limit has passed.
        """
        most = int(self.options["images_gib"]) * 2**30
        images.make_available(self, image, timeout_s, most or None)

    def store_name(self) -> str:
        """Returns a text that differs between two stores of images: the client's words, and the variables that lead to
        another daemon or storage."""
        found = {name: value for name, value in client_variables().items() if name.startswith(("DOCKER_", "CONTAINER"))}
        return json.dumps([self.client, found], sort_keys=True)

    def image_facts(self, image: str) -> tuple[str, int] | None:
        """Returns id and size in bytes of an image on this machine; None without the image.

        Raises:
            InfrastructureFault: The client does not work.
        """
        ran = self.command(["image", "inspect", "--format", "{{.Id}} {{.Size}}", image])
        if ran.status == "ok":
            number, size = ran.stdout.decode().split()
            return number, int(size)
        if UNKNOWN_IMAGE.search(ran.stderr):
            return None
        raise InfrastructureFault(f"{self.PROGRAM} image inspect fails: {_last_line(ran) or ran.status}")

    def pull_image(self, image: str, timeout_s: float) -> CommandOutput:
        """Pulls an image from its registry."""
        return self.command(["pull", "--quiet", image], timeout_s)

    def remove_image(self, image: str) -> bool:
        """Removes an image that no container uses; returns False if a container uses the image."""
        return self.command(["rmi", image], 10 * COMMAND_S).status == "ok"

    def start(self, image: str, timeout_s: float) -> CommandLineContainer:
        """Starts a container of an available image, and waits until commands can run.

        Raises:
            InfrastructureFault: The container does not start, or the image has no `sh`, `date` or `sleep`.
        """
        deadline = time.monotonic() + timeout_s
        self._guard()
        container = CommandLineContainer(self, f"{owner.PREFIX}-{owner.owner()}-{secrets.token_hex(4)}")
        ready = False
        try:
            ran = self.command(
                ["run", *self._arguments(container.name), "--entrypoint", "sh", image, *self._process_1()], timeout_s
            )
            if ran.status == "ok":
                words = [*self.exec_words(None), container.name, "sh", "-c", "date +%s && sleep 0"]
                ran = self.command(words, max(1.0, deadline - time.monotonic()))
            ready = ran.status == "ok"
        finally:
            if not ready:
                container.remove(COMMAND_S)
        if not ready:
            raise InfrastructureFault(f"no container of {image} starts: {_last_line(ran) or ran.status}")
        return container

    def _guard(self) -> None:
        """Starts the reaper of this process' containers; with a new reaper, removes containers of earlier processes
        whose reaper was killed too: all of ended owners, and from before a reboot those that ended a day ago."""
        mine = ["ps", "--all", "--filter", f"label={owner.LABEL}={owner.owner()}", "--format", "{{.Names}}"]
        if not owner.guard([*self.client, *mine], [*self.client, "rm", "--force", "--volumes"]):
            return
        labelled = ["--filter", f"label={owner.LABEL}"]
        ran = self.command(["ps", "--all", *labelled, "--format", "{{.Names}}"])
        names = ran.stdout.decode(errors="replace").split()
        if left := [name for name in names if owner.is_dead(name.removeprefix(f"{owner.PREFIX}-").rpartition("-")[0])]:
            self.command(["rm", "--force", "--volumes", *left])
        self.command(["container", "prune", "--force", *labelled, "--filter", "until=24h"])

    def _process_1(self) -> list[str]:
        return ["-c", PROCESS_1.format(end=int(time.time()) + int(self.options["lifetime_s"]))]

    def _arguments(self, name: str) -> list[str]:
        """Returns the arguments of `run` before the image."""
        chosen = self.options
        words = ["--detach", "--pull=never", f"--name={name}", *self.FLAGS, "--no-healthcheck", "--log-driver=none"]
        words += [f"--label={owner.LABEL}={owner.owner()}", f"--label={owner.PREFIX}.host={owner.host()}"]
        words += ["--stop-signal=SIGKILL", "--security-opt=no-new-privileges", "--cap-drop=ALL"]
        words += [f"--cap-add={capability}" for capability in chosen["capabilities"]]
        words += [f"--network={chosen['network']}"]
        if chosen["memory_mib"]:
            words += [f"--memory={chosen['memory_mib']}m", f"--memory-swap={chosen['memory_mib']}m"]
        if chosen["cpus"]:
            words.append(f"--cpus={chosen['cpus']}")
        words.append(f"--pids-limit={chosen['processes'] or -1}")
        if chosen["disk_gib"]:
            words.append(f"--storage-opt=size={chosen['disk_gib']}G")
        return [*words, *chosen["arguments"]]

    def exec_words(self, user: str | None) -> list[str]:
        """Returns the words of `exec` before the container's name.

        Args:
            user: User of the command; None for the option `user`, or else the image's user.
        """
        user = user or self.options["user"]
        return ["exec", *([f"--user={user}"] if user else [])]

    def command(self, words: Sequence[str], timeout_s: float = COMMAND_S, **limits: Any) -> CommandOutput:
        """Runs the client with a subcommand (`run_program`)."""
        return run_program([*self.client, *words], timeout_s, **limits)


class Podman(CommandLineRuntime):
    """Podman: containers of this user, without a daemon."""

    PROGRAM = "podman"
    FLAGS = ("--http-proxy=false",)


class Docker(CommandLineRuntime):
    """Docker: containers of the machine's daemon."""

    PROGRAM = "docker"


class CommandLineContainer:
    """A running container of podman or docker.

    A container may end early. If the policy is the cause, `run` returns the status `failed` without an exit code, and
    so do later calls. If the cause is outside the container, `run` raises InfrastructureFault:

    - The memory limit of the container, or an end of process 1 by itself: the policy.
    - A SIGKILL of process 1, a removed container, the end of `lifetime_s`, an unreachable daemon: outside.
    """

    def __init__(self, runtime: CommandLineRuntime, name: str) -> None:
        self.runtime, self.name = runtime, name
        self._lifetime_over = time.monotonic() + float(runtime.options["lifetime_s"])
        self._memory_kills = memory_kills()
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
        """Runs a program in the container, as the container's user, and waits for its end (`Container.run`).

        Raises:
            InfrastructureFault: The container was ended from outside, or the client does not work.
        """
        words = self.runtime.exec_words(None)
        words += ["--interactive"] if stdin else []
        words += [f"--workdir={folder}"] if folder else []
        keys = {name: value for name, value in (variables or {}).items() if names_secret(name)}
        words += [
            f"--env={name}" if name in keys else f"--env={name}={value}" for name, value in (variables or {}).items()
        ]
        if refused := _refuse_arguments([*words, *argv, *keys.values()]):
            return refused
        ran = self.runtime.command(
            [*words, self.name, *argv], timeout_s, stdin=stdin, limit=limit, variables=keys, cancellable=True
        )
        if ran.status in ("timeout", "output"):
            self.end_processes(COMMAND_S)
            return self._result_of_all or ran
        if ran.exit is None:
            raise InfrastructureFault(f"{self.runtime.PROGRAM} exec was killed")
        if ran.exit == SIGKILLED or (ran.exit != 0 and ERROR.search(ran.stderr[-4096:])):
            ran = self._explain(ran)
        self._memory_kills = memory_kills()
        return ran

    def end_processes(self, timeout_s: float) -> None:
        """Kills all processes in the container except process 1. If no program can be started in the container, because
        its processes have reached the limit, the container is restarted with its files.

        Root in the container can replace `sh`, and then keep processes until the container is removed.

        Raises:
            InfrastructureFault: The container was ended from outside, or the client does not work.
        """
        deadline = time.monotonic() + timeout_s
        ran = self.runtime.command([*self.runtime.exec_words("0"), self.name, "sh", "-c", "kill -9 -1"], timeout_s / 2)
        if ran.status == "ok" or self._end() is not None:
            return
        seconds = max(1.0, deadline - time.monotonic())
        ran = self.runtime.command(["restart", "-t", "0", self.name], seconds)
        if ran.status != "ok" and self._end() is None:
            raise InfrastructureFault(f"processes of a container cannot be ended: {_last_line(ran) or ran.status}")

    def remove(self, timeout_s: float) -> None:
        """Removes the container with its files; may be called again.

        Raises:
            InfrastructureFault: The container cannot be removed.
        """
        ran = self.runtime.command(["rm", "--force", "--volumes", self.name], timeout_s)
        if ran.status != "ok" and b"no such container" not in ran.stderr.lower():
            raise InfrastructureFault(f"the container {self.name} cannot be removed: {_last_line(ran) or ran.status}")

    def process(self) -> int:
        """Returns the process id, on this machine, of process 1 of the container.

        Raises:
            InfrastructureFault: The container does not run, or runs on another machine.
        """
        ran = self.runtime.command(["container", "inspect", "--format", "{{.State.Pid}}", self.name])
        number = ran.stdout.decode(errors="replace").strip()
        if not number.isdecimal() or int(number) == 0 or not Path(f"/proc/{number}").exists():
            raise InfrastructureFault(f"the container {self.name} has no process here: {_last_line(ran) or number}")
        return int(number)

    def _explain(self, ran: CommandOutput) -> CommandOutput:
        """Returns the result of a command whose exit code may be the client's own.

        Raises:
            InfrastructureFault: The client failed, and not because of the processes in the container.
        """
        if (ended := self._end()) is not None:
            return ended
        if ran.exit == SIGKILLED or self._starts_programs():
            return ran
        self.end_processes(COMMAND_S)
        if not self._starts_programs():
            raise InfrastructureFault(f"{self.runtime.PROGRAM} exec fails: {_last_line(ran)}")
        return ran

    def _starts_programs(self) -> bool:
        words = [*self.runtime.exec_words("0"), self.name, "sh", "-c", ":"]
        return self.runtime.command(words).status == "ok"

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
        ran = self.runtime.command(["container", "inspect", "--format", shown, self.name])
        words = ran.stdout.decode(errors="replace").split()
        if ran.status != "ok" or len(words) != 3:
            raise InfrastructureFault(f"the container {self.name} is gone: {_last_line(ran) or ran.status}")
        if words[0] == "true":
            return None
        if words[1] == "true" or (words[2] == str(SIGKILLED) and memory_kills() > self._memory_kills):
            return "its processes used too much memory"
        if words[2] == str(SIGKILLED):
            raise InfrastructureFault(f"the container {self.name} was killed from outside")
        if time.monotonic() > self._lifetime_over - 1:
            raise InfrastructureFault(f"the container {self.name} ended after its lifetime_s")
        return f"process 1 ended with exit code {words[2]}"


def memory_kills() -> int:
    """Returns the number of processes that the kernel has killed for memory since the start of this machine, whether a
    container or the machine was out of memory; 0 if unknown.

    Podman does not always notice that process 1 was killed for memory. A machine that is itself out of memory kills
    large processes first, and process 1 of a container is the smallest.
    """
    found = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.M)
    return int(found[1]) if found else 0


def _refuse_arguments(words: Sequence[str]) -> CommandOutput | None:
    """Returns a failed result for arguments that no program can receive; None for others."""
    if any("\0" in word for word in words):
        return CommandOutput("failed", 2, b"", b"an argument cannot contain NUL")
    if sum(len(word.encode(errors="surrogateescape")) for word in words) > LONGEST_ARGUMENTS:
        return CommandOutput("failed", 126, b"", b"the arguments are too long")
    return None


def _last_line(ran: CommandOutput) -> str:
    """Returns the last line of standard error, at most 500 characters."""
    lines = ran.stderr.decode(errors="replace").strip().splitlines()
    return lines[-1][-500:] if lines else ""
