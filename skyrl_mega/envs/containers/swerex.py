"""Containers with a server of SWE-ReX, started anywhere by a program of the user and reached by HTTP.

The server runs in the container with the policy's commands, often as the same user, so its replies are as little
trusted as the commands' outputs.
"""

from __future__ import annotations

import base64
import logging
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar
from urllib.parse import urlsplit

from skyrl_mega.common.errors import UserError
from skyrl_mega.envs.containers.inside import CLEAN, FIRST, PIECE, READ, BrokenReply, RemoteCall, decoded
from skyrl_mega.envs.containers.program import refuse_missing
from skyrl_mega.envs.containers.rex_client import CommandLate, CommandRefused, RexClient
from skyrl_mega.envs.containers.runtime import CommandOutput
from skyrl_mega.envs.containers.starter import StarterProgram
from skyrl_mega.envs.faults import InfrastructureFault
from skyrl_mega.envs.options import Option, text, whole

IMAGE, LIFETIME = "{image}", "{lifetime_s}"
"""Placeholders in the command."""
PART = 3 * 2**21
"""Bytes of standard input per request; a multiple of 3, so that only the last part ends with padding."""
USED = "/tmp/.skyrl-mega-used"
"""Folder that marks a container as used."""
GRACE_S = 20.0
"""Seconds for a reply after the end of a command's own time."""
PROCESSES = re.compile(r"(?: +\d+:\d+)+ *")


class SweRexRuntime:
    """Containers with a server of SWE-ReX. A user's program starts a container with the server, prints the server's
    address and token, and removes the container when its input ends.

    Args:
        options: Options by `OPTIONS`, with defaults filled in.
    """

    OPTIONS: ClassVar[Mapping[str, Option]] = {
        "command": text(None, "starts a server for {image}, prints its address and token, and ends with its input"),
        "lifetime_s": whole(7200, "of a container at most; {lifetime_s} in the command", low=1),
    }

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.words = shlex.split(options["command"])
        self.lifetime_s = int(options["lifetime_s"])

    @classmethod
    def check_options(cls, options: Mapping[str, Any], key: str) -> None:
        """Raises UserError for a command that is missing, has an open quotation, or names the image in no argument.

        Args:
            options: Options of the runtime, with defaults filled in.
            key: Setting that contains the options, for errors.
        """
        command = options["command"]
        fix = f"{key}.command='/path/to/start_server {IMAGE}'"
        if command is None:
            raise UserError("swerex needs a program that starts a server", key=f"{key}.command", fix=fix)
        try:
            words = shlex.split(command)
        except ValueError as error:
            raise UserError(error, key=f"{key}.command", value=command, fix="close the quotation") from error
        if not any(IMAGE in word for word in words[1:]):
            raise UserError(f"no argument has {IMAGE}", key=f"{key}.command", value=command, fix=fix)

    def check(self, key: str) -> None:
        """Raises UserError if the program does not exist on this machine; starts nothing. `key` is the setting that
        contains the options."""
        refuse_missing(self.words[0], f"{key}.command", "give the program's absolute path, on every node")

    def pull(self, image: str, timeout_s: float) -> None:
        """Does nothing: the user's program makes the image available."""

    def start(self, image: str, timeout_s: float) -> SweRexContainer:
        """Starts a container of an image by the user's program, and returns it once its server answers. Ends the
        program after a fault. `timeout_s` limits start, answer and preparation together, with at least 1 s for each of
        the last two.

        Raises:
            InfrastructureFault: The program cannot be started or prints no address in `timeout_s` seconds, the server
                does not answer, or the container has served a trajectory before or lacks a tool.
        """
        deadline = time.monotonic() + timeout_s
        places = {IMAGE: image, LIFETIME: str(self.lifetime_s)}
        starter = StarterProgram([_with_values(word, places) for word in self.words])
        container = None
        try:
            client = RexClient(*_address(starter.first_line(timeout_s)), alive=lambda: not starter.ended())
            container = SweRexContainer(client, starter)
            client.wait_until_alive(max(1.0, deadline - time.monotonic()))
            container.prepare(max(1.0, deadline - time.monotonic()))
            return container
        except InfrastructureFault:
            _end(starter, GRACE_S)
            raise


class SweRexContainer:
    """A container with a server of SWE-ReX, which runs one command at a time."""

    def __init__(self, client: RexClient, starter: StarterProgram) -> None:
        self._client = client
        self._starter = starter
        self._processes = ""
        """The container's own processes, which `end_processes` spares."""
        self._clean = True
        """True if no process of a command can be left."""

    def prepare(self, timeout_s: float) -> None:
        """Marks the container as used, and notes its processes, which `end_processes` spares.

        Raises:
            InfrastructureFault: The container was used before or lacks a tool, or the server is gone or does not answer
                in `timeout_s` seconds.
        """
        try:
            status, out = self._client.execute(["sh", "-c", FIRST, "first", USED], timeout_s)
        except (CommandLate, CommandRefused) as error:
            raise InfrastructureFault(f"{self._client.url}: the image has no working shell: {error}") from error
        if status or not PROCESSES.fullmatch(out.strip("\n")):
            raise InfrastructureFault(f"{self._client.url}: {out.strip()[:200] or 'the image has no working shell'}")
        self._processes = out.strip("\n")

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
        """Runs a program in the container, waits for its end, and kills the processes left by the program. Only one
        thread may use the container at a time.

        Args:
            argv: Program and arguments; no shell is involved.
            timeout_s: Time limit in seconds.
            stdin: Standard input.
            folder: Working folder; None for the image's own.
            variables: Environment variables, in addition to the image's.
            limit: Maximum size of standard output, and of standard error, in bytes.

        Returns:
            Status, exit code and outputs. Status `timeout` for a late program, `output` for too much output. If the
            policy has broken the shell, or left no space for a process, the status is `failed`, and processes may
            survive until `end_processes`.

        Raises:
            InfrastructureFault: The server is gone or gives a malformed reply, or a process cannot be killed.
        """
        call = RemoteCall(
            argv, timeout_s, limit, len(stdin), folder, variables=variables, spared=self._processes, text=True
        )
        self._clean = False
        try:
            for number, start in enumerate(range(0, len(stdin), PART)):
                part = base64.b64encode(stdin[start : start + PART]).decode()
                self._client.write_file(call.part_path(number), part, GRACE_S)
            output = self._outputs(call, timeout_s)
            self._clean = True
            return output
        except CommandRefused as error:
            # programs of the container itself are missing, or no process can be started: the policy's doing
            return CommandOutput("failed", 126, b"", str(error).encode())
        except CommandLate:
            self.end_processes(GRACE_S)
            return CommandOutput("timeout", None, b"", b"")
        except BrokenReply:
            # HTTP replies are whole, so a program of the policy has killed or replaced the shell
            return CommandOutput("failed", None, b"", b"")

    def end_processes(self, timeout_s: float) -> None:
        """Kills all processes except those of the new container; sends nothing if the last `run` has killed them. If
        the policy's processes leave no space for another process, nothing is killed, and later commands fail.

        Raises:
            InfrastructureFault: A process cannot be killed in `timeout_s` seconds, or the server is gone.
        """
        if self._clean:
            return
        try:
            status, _ = self._client.execute(["sh", "-c", CLEAN, "clean", self._processes], timeout_s)
        except CommandRefused:
            return
        except CommandLate as error:
            raise InfrastructureFault(f"{self._client.url}: processes cannot be killed: {error}") from error
        if status:
            raise InfrastructureFault(f"{self._client.url}: a process cannot be killed")
        self._clean = True

    def remove(self, timeout_s: float) -> None:
        """Closes the input of the program that started the container, and waits for its end; kills a program that runs
        for `timeout_s` seconds more. Raises nothing: after a failure logs a warning that the container may still exist.
        """
        _end(self._starter, timeout_s)

    def _outputs(self, call: RemoteCall, timeout_s: float) -> CommandOutput:
        _, data = self._client.execute(call.words(), timeout_s + GRACE_S / 2)
        reply = call.reply(data.encode())
        if reply.why == "left":
            raise InfrastructureFault(f"{self._client.url}: a process cannot be killed")
        out = self._rest(f"{call.folder}/out", reply.stdout, reply.stdout_size)
        err = self._rest(f"{call.folder}/err", reply.stderr, reply.stderr_size)
        if reply.stdout_size > PIECE or reply.stderr_size > PIECE:
            self._client.execute(["rm", "-rf", call.folder], GRACE_S)
        return reply.output(out, err)

    def _rest(self, path: str, first: bytes, size: int) -> bytes:
        """Returns a whole output, from its first part and further requests."""
        data = bytearray(first)
        while len(data) < size:
            words = ["sh", "-c", READ, "read", path, str(len(data) + 1), str(min(PIECE, size - len(data)))]
            piece = decoded(self._client.execute(words, GRACE_S)[1].encode())
            if not piece:
                raise BrokenReply("an output has vanished")
            data += piece
        return bytes(data[:size])


def _address(line: str) -> tuple[str, str]:
    """Returns address and token of the program's first line.

    Raises:
        InfrastructureFault: The line has another form. The fault does not show the line, which may contain the token.
    """
    words = line.split()
    try:
        url = urlsplit(words[0])
        valid = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0 and "@" not in url.netloc
        valid = valid and not (url.query or url.fragment)
    except (ValueError, IndexError):
        valid = False
    if not valid or len(words) != 2:
        raise InfrastructureFault(
            "the first line of session_options.command has no address and token; allowed: http://host:port token"
        )
    return words[0].rstrip("/"), words[1]


def _with_values(word: str, values: Mapping[str, str]) -> str:
    """Returns a word with the values of its placeholders; a value is never read as a placeholder."""
    pattern = "|".join(map(re.escape, values))
    return re.sub(pattern, lambda match: values[match.group()], word)


def _end(starter: StarterProgram, timeout_s: float) -> None:
    try:
        starter.end(timeout_s)
    except InfrastructureFault as fault:  # the trajectory is over; a person has to know
        logging.getLogger(__name__).warning("%s; its container may still exist", fault)
