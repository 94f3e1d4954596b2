"""A client program of the policy in a container: command, scripts, address of the policy, and end."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from skyrl_mega.common.errors import UserError
from skyrl_mega.envs.agent import AgentEndpoint
from skyrl_mega.envs.containers import files
from skyrl_mega.envs.containers.network import LocalContainer, listen_inside
from skyrl_mega.envs.containers.runtime import Container
from skyrl_mega.envs.faults import InfrastructureFault
from skyrl_mega.envs.harness.program import SCRIPTS, TASK, TASK_VARIABLE, split
from skyrl_mega.envs.sandbox import SandboxResult
from skyrl_mega.envs.sandbox.run import GRACE_S
from skyrl_mega.envs.swe.session import File, UnfitError

FOLDER = "/tmp/skyrl_agent"
"""Folder of the program in the container: task, scripts and answer."""
LOCAL = ("podman", "docker")
"""Container runtimes with the containers on this machine, where the policy's address is."""


@dataclass(frozen=True)
class ContainerProgram:
    """A program for a container, started once per trajectory.

    Args:
        argv: Program and arguments, as in the container.
        scripts: Name → content of scripts of this machine, for `FOLDER`.
        timeout_s: Seconds from start to end.
        environment: Further environment variables.
        output_bytes: Maximum size of each output.
    """

    argv: tuple[str, ...]
    scripts: Mapping[str, bytes]
    timeout_s: float
    environment: Mapping[str, str]
    output_bytes: int

    @classmethod
    def of(
        cls, command: str, key: str, *, timeout_s: float, environment: Mapping[str, str], output_bytes: int
    ) -> ContainerProgram:
        """Returns the program of a command, with the content of the scripts of this machine among the arguments.

        A script is an argument with an ending in `SCRIPTS`, such as `.py`, that names a file of this machine. `run`
        writes the script into `FOLDER`, and the argument becomes the path there. Two scripts must not have the same
        file name. All other words are names in the container, also an absolute path without a file here.

        Args:
            command: Program and arguments, split as by a shell.
            key: Setting with the command, for errors.
            timeout_s, environment, output_bytes: As for the class.

        Raises:
            UserError: The command is empty, a quotation is not closed, or a relative path with an ending in `SCRIPTS`
                names no file.
            OSError: A script cannot be read.
        """
        words, scripts = split(command, key), dict[str, bytes]()
        for place, word in enumerate(words[1:], 1):
            if _is_script(word):
                name = os.path.basename(word)
                words[place], scripts[name] = f"{FOLDER}/{name}", Path(word).read_bytes()
            elif word.endswith(SCRIPTS) and not os.path.isabs(word):
                raise UserError("there is no such file", key=key, value=word, fix="correct the path")
        return cls(tuple(words), scripts, timeout_s, environment, output_bytes)

    def run(
        self, container: Container, endpoint: AgentEndpoint, texts: Mapping[str, str], folder: str | None
    ) -> SandboxResult:
        """Runs the program to the end, or to the time limit: `timeout_s`, or `endpoint.seconds` if shorter. All
        processes of the container are dead on return.

        Args:
            container: A container on this machine.
            endpoint: Address and key of the policy.
            texts: Name → text of files for `FOLDER`, `TASK` included.
            folder: Working folder; None for `FOLDER`.

        Returns:
            The result. A program that fails, is late or prints too much is not an error: the status tells.

        Raises:
            InfrastructureFault: The policy cannot be made reachable in the container, the container takes no files, or
                it is gone.
        """
        start = time.monotonic()
        limit_s = self.timeout_s if endpoint.seconds is None else min(self.timeout_s, endpoint.seconds)
        inside = reachable(endpoint, container)
        given = {**self.scripts, **{name: text.encode() for name, text in texts.items()}}
        _write(container, {name: File(data) for name, data in given.items()}, limit_s)
        output = container.run(
            self.argv,
            max(1.0, limit_s - (time.monotonic() - start)),
            folder=folder or FOLDER,
            variables={**self.environment, **inside.variables(), TASK_VARIABLE: f"{FOLDER}/{TASK}"},
            limit=self.output_bytes,
        )
        container.end_processes(GRACE_S)
        stdout, stderr = (data.decode(errors="replace") for data in (output.stdout, output.stderr))
        return SandboxResult(output.status, output.exit, stdout, stderr, time.monotonic() - start, {})


def read_file(container: Container, name: str, most_bytes: int) -> str | None:
    """Returns the text of the file `name` in `FOLDER`, cut after `most_bytes`; None without the file. Anything but a
    plain readable file, such as a link, counts as an empty text, and so does a late reading.

    Raises:
        InfrastructureFault: The container is gone.
    """
    command = '[ -e "$1" ] || [ -L "$1" ] || exit 9; [ -f "$1" ] && [ ! -L "$1" ] && exec head -c "$2" "$1"'
    output = container.run(["sh", "-c", command, "sh", f"{FOLDER}/{name}", str(most_bytes)], GRACE_S, limit=most_bytes)
    if output.exit == 9:
        return None
    return output.stdout.decode(errors="replace") if output.status == "ok" else ""


def reachable(endpoint: AgentEndpoint, container: Container) -> AgentEndpoint:
    """Returns the endpoint with its address in the container, and makes the endpoint answer there. Returns the endpoint
    unchanged for a container with the network of this process.

    Raises:
        InfrastructureFault: The container is gone or not on this machine, this machine does not let a process enter its
            network, or the endpoint accepts no further socket.
    """
    if not isinstance(container, LocalContainer):
        raise InfrastructureFault("the container is not on this machine, where the address of the policy is")
    listener = listen_inside(container.process())
    if listener is None:
        return endpoint
    host, port = listener.getsockname()
    if endpoint.serve is None:
        listener.close()
        raise InfrastructureFault("the endpoint accepts no further socket, so a container cannot reach the policy")
    endpoint.serve(listener)
    return replace(endpoint, url=f"http://{host}:{port}")


def words_with_scripts(command: str, key: str) -> list[str]:
    """Returns the words of a command, split as by a shell, with absolute paths of the scripts of this machine.

    A script is a word with an ending in `SCRIPTS`, such as `.py`, that names an existing file. A relative path starts
    at the current folder of this process. Other words stay unchanged, and a missing script is not an error here.

    Args:
        command: Program and arguments.
        key: Setting with the command, for errors.

    Raises:
        UserError: A quotation is not closed, or the command has no word.
    """
    return [os.path.abspath(word) if _is_script(word) else word for word in split(command, key)]


def _is_script(word: str) -> bool:
    return word.endswith(SCRIPTS) and os.path.isfile(word)


def check_reach(name: str, options: Mapping[str, Any], key: str) -> None:
    """Checks that containers of a runtime can reach the policy.

    Args:
        name: Name of the runtime.
        options: Options of the runtime.
        key: Setting with the name, for errors; `<key>_options` is the setting of the options.

    Raises:
        UserError: The containers are on other machines, or this process may not enter their network.
    """
    if name not in LOCAL:
        raise UserError(
            f"its containers cannot reach the policy, whose address is on this machine; allowed: {', '.join(LOCAL)}",
            key=key,
            value=name,
        )
    if os.geteuid() != 0 and options.get("network", "none") != "host":
        raise UserError(
            "only root may bring the address of the policy into a network of the container's own",
            key=f"{key}_options.network",
            value=options.get("network", "none"),
            fix="start the run as root, or give host; programs then reach all that this machine reaches",
        )


def _write(container: Container, given: Mapping[str, File], timeout_s: float) -> None:
    made = container.run(["mkdir", "-p", FOLDER], timeout_s)
    try:
        if made.status != "ok":
            raise UnfitError(f"{FOLDER} cannot be made: {made.stderr.decode(errors='replace').strip()[-300:]}")
        files.write(container, FOLDER, given, timeout_s)
    except UnfitError as error:  # nothing of the policy has run yet
        raise InfrastructureFault(f"the container takes no files: {error}") from error
