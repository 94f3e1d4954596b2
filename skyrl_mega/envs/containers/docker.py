"""Containers of podman and docker, by their command lines."""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import time
from collections.abc import Mapping
from typing import Any, ClassVar

from skyrl_mega.common.errors import UserError
from skyrl_mega.common.limits import CONTAINER_LIFETIME_S
from skyrl_mega.envs.containers import images, owner
from skyrl_mega.envs.containers.docker_container import CommandLineContainer, DockerClient
from skyrl_mega.envs.containers.program import COMMAND_S, client_variables, refuse_missing
from skyrl_mega.envs.containers.removal import start_removal
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
UNKNOWN_IMAGE = re.compile(rb"image not known|no such image|no such object", re.I)
"""Error of `image inspect` for an image that is not on this machine."""


class CommandLineRuntime:
    """Podman or docker, by the command line of its client. `options` follow `OPTIONS`; options with a default may be
    missing."""

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
        "lifetime_s": whole(
            CONTAINER_LIFETIME_S, "seconds after which a container ends by itself", low=10, high=30 * 86400
        ),
    }

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = filled(self.PROGRAM, options, self.OPTIONS)
        program = self.options["program"] or self.PROGRAM
        self.client = DockerClient((program, *self.options["global_arguments"]), self.options["user"])

    @classmethod
    def check_options(cls, options: Mapping[str, Any], key: str) -> None:
        """Raises UserError for unknown or invalid options, and for further arguments that the runtime sets itself.

        Args:
            options: Options of the runtime; options with a default may be missing.
            key: Setting that contains the options, for errors.
        """
        for word in filled(key, options, cls.OPTIONS)["arguments"]:
            if word.partition("=")[0] in RESERVED:
                raise UserError(
                    "the runtime sets this argument itself", key=f"{key}.arguments", value=word, fix="leave it out"
                )

    def check(self, key: str) -> None:
        """Checks that the client exists and that podman, or docker's daemon, answers.

        Args:
            key: Setting that contains the options, for errors.

        Raises:
            UserError: The client is missing, does not answer, or cannot limit the resources of containers here.
            InfrastructureFault: The client cannot be started.
        """
        fix = f"install {self.PROGRAM}, or give the path of the program"
        refuse_missing(self.client.words[0], f"{key}.program", fix)
        ran = self.client.command(["info", "--format", "{{json .}}"])
        try:
            facts = json.loads(ran.stdout) if ran.status == "ok" else None
        except ValueError:
            facts = None
        if not isinstance(facts, dict) or facts.get("ServerErrors"):
            raise UserError(
                f"`{' '.join(self.client.words)} info` fails: {ran.last_line()}",
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
        """Makes the image available within `timeout_s` seconds: pulls a missing image, and then removes the least
        recently used pulled images above `images_gib`. Returns at once if the image is on this machine.

        Raises:
            UserError: There is no such image, its registry refuses access, or the folder of notes on pulled images
                belongs to another user.
            InfrastructureFault: The registry cannot be reached, the time limit has passed, or the client does not work.
            OSError: The note on a pulled image cannot be written.
        """
        most = int(self.options["images_gib"]) * 2**30
        images.make_available(self, image, timeout_s, most or None)

    def store_name(self) -> str:
        """Returns a text that differs between two stores of images: the client's words, and the variables that lead to
        another daemon or storage."""
        found = {name: value for name, value in client_variables().items() if name.startswith(("DOCKER_", "CONTAINER"))}
        return json.dumps([self.client.words, found], sort_keys=True)

    def image_facts(self, image: str) -> tuple[str, int] | None:
        """Returns id and size in bytes of an image on this machine; None without the image.

        Raises:
            InfrastructureFault: The client does not work.
        """
        ran = self.client.command(["image", "inspect", "--format", "{{.Id}} {{.Size}}", image])
        if ran.status == "ok":
            number, size = ran.stdout.decode().split()
            return number, int(size)
        if UNKNOWN_IMAGE.search(ran.stderr):
            return None
        raise InfrastructureFault(f"{self.PROGRAM} image inspect fails: {ran.last_line()}")

    def pull_image(self, image: str, timeout_s: float) -> CommandOutput:
        """Pulls an image from its registry, once, and returns status and output. A failed pull raises nothing, nor does
        a pull of more than `timeout_s` seconds.

        Raises:
            InfrastructureFault: The client cannot be started.
        """
        return self.client.command(["pull", "--quiet", image], timeout_s)

    def remove_image(self, image: str) -> bool:
        """Removes an image and returns True; returns False if a container uses the image, or the removal fails
        otherwise.

        Raises:
            InfrastructureFault: The client cannot be started.
        """
        return self.client.command(["rmi", image], 10 * COMMAND_S).status == "ok"

    def start(self, image: str, timeout_s: float) -> CommandLineContainer:
        """Starts a container of an available image, and returns it once commands can run. Removes a container that
        fails.

        Raises:
            InfrastructureFault: The container or its reaper does not start in `timeout_s` seconds, or the image has no
                `sh`, `date` or `sleep`.
        """
        deadline = time.monotonic() + timeout_s
        self._guard()
        name = f"{owner.PREFIX}-{owner.owner()}-{secrets.token_hex(4)}"
        container = CommandLineContainer(self.client, name, float(self.options["lifetime_s"]))
        with contextlib.ExitStack() as undo:
            undo.callback(lambda: start_removal(container).join(COMMAND_S))
            ran = self.client.command(
                ["run", *self._arguments(container.name), "--entrypoint", "sh", image, *self._process_1()], timeout_s
            )
            if ran.status == "ok":
                words = [*self.client.exec_words(), container.name, "sh", "-c", "date +%s && sleep 0"]
                ran = self.client.command(words, max(1.0, deadline - time.monotonic()))
            if ran.status != "ok":
                raise InfrastructureFault(f"no container of {image} starts: {ran.last_line()}")
            undo.pop_all()
        return container

    def _guard(self) -> None:
        """Starts the reaper of this process' containers; with a new reaper, removes containers of earlier processes
        whose reaper was killed too: all of ended owners, and from before a reboot those that ended a day ago."""
        mine = ["ps", "--all", "--filter", f"label={owner.LABEL}={owner.owner()}", "--format", "{{.Names}}"]
        removal = [*self.client.words, "rm", "--force", "--volumes"]
        if not owner.start_reaper([*self.client.words, *mine], removal, _label()):
            return
        labelled = ["--filter", f"label={owner.LABEL}"]
        ran = self.client.command(["ps", "--all", *labelled, "--format", "{{.Names}}"])
        names = ran.stdout.decode(errors="replace").split()
        if left := [name for name in names if owner.is_dead(name.removeprefix(f"{owner.PREFIX}-").rpartition("-")[0])]:
            self.client.command(["rm", "--force", "--volumes", *left])
        self.client.command(["container", "prune", "--force", *labelled, "--filter", "until=24h"])

    def _process_1(self) -> list[str]:
        return ["-c", PROCESS_1.format(end=int(time.time()) + int(self.options["lifetime_s"]))]

    def _arguments(self, name: str) -> list[str]:
        """Returns the arguments of `run` before the image."""
        chosen = self.options
        words = ["--detach", "--pull=never", f"--name={name}", *self.FLAGS, "--no-healthcheck", "--log-driver=none"]
        words += [_label(), f"--label={owner.PREFIX}.host={owner.host()}"]
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


def _label() -> str:
    """Returns the argument of `run` that names this process as the owner."""
    return f"--label={owner.LABEL}={owner.owner()}"


class Podman(CommandLineRuntime):
    """Podman: containers of this user, without a daemon."""

    PROGRAM = "podman"
    FLAGS = ("--http-proxy=false",)


class Docker(CommandLineRuntime):
    """Docker: containers of the machine's daemon."""

    PROGRAM = "docker"
