"""Client of a server of SWE-ReX: bounded requests, repeated under the same id after a lost connection."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from functools import lru_cache
from ssl import SSLContext
from typing import Any
from urllib.parse import urlsplit

import httpx

from skyrl_mega.common.replies import ask, error_text
from skyrl_mega.common.safe_read import Malformed, parse_json
from skyrl_mega.common.terminal import one_line
from skyrl_mega.envs.faults import InfrastructureFault

FAILED = 511
"""Status of a reply with an exception of the server."""
REPEATED = frozenset({408, 425, 429, 502, 503, 504})
"""Statuses, of proxies, after which a request is repeated."""
ATTEMPTS = 6
"""Maximum number of failures in a row; a connection lost after `LONG_S` seconds is no failure."""
PAUSES_S = (0.2, 3.0)
"""First and longest pause between attempts."""
LONG_S = 10.0
ALIVE_S = 5.0
"""Seconds for an answer to `/is_alive`."""
LATE = "CommandTimeoutError"
REFUSALS = frozenset({"OSError", "FileNotFoundError", "PermissionError", "NotADirectoryError", "BlockingIOError"})
"""Exceptions of a server whose container lacks a program, a folder, or space for a process."""
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


class CommandLate(Exception):
    """The server has ended a command for lateness."""


class CommandRefused(Exception):
    """The server could not start a command, or write a file, in its container."""


class RexClient:
    """A client of one server.

    The server runs one request at a time, and answers a repeated request id with the stored reply.

    Args:
        url: Address of the server.
        token: API key of the server.
        alive: Returns False if the server is known to be gone.
    """

    def __init__(self, url: str, token: str, alive: Callable[[], bool]) -> None:
        self.url = url
        self._token = token
        self._alive = alive

    def wait_until_alive(self, timeout_s: float) -> None:
        """Waits until the server answers that it is alive.

        Raises:
            InfrastructureFault: The server does not answer in `timeout_s` seconds, is gone, or refuses the token.
        """
        asyncio.run(self._wait_until_alive(timeout_s))

    def execute(self, argv: Sequence[str], timeout_s: float) -> tuple[int, str]:
        """Runs a program in the container, without a shell, and returns exit code and standard output.

        Args:
            argv: Program and arguments.
            timeout_s: Seconds until the server ends the program.

        Raises:
            CommandLate: The server ended the program after `timeout_s` seconds.
            CommandRefused: The program cannot be started.
            InfrastructureFault: The server is gone, fails, refuses, does not answer within `LONG_S` seconds more, or
                its reply has another form.
        """
        body = {"command": list(argv), "timeout": timeout_s, "shell": False, "check": False}
        reply = self._post("/execute", body, timeout_s + LONG_S)
        status, out = reply.get("exit_code"), reply.get("stdout")
        if isinstance(status, bool) or not isinstance(status, int) or not isinstance(out, str):
            raise InfrastructureFault(f"{self.url}/execute gave no exit code or output")
        return status, out

    def write_file(self, path: str, content: str, timeout_s: float) -> None:
        """Writes a text file in the container, and creates the folders above the file.

        Raises:
            CommandRefused: The file cannot be written.
            CommandLate: The server reports that the writing took too long.
            InfrastructureFault: The server is gone, fails, or does not answer in `timeout_s` seconds.
        """
        self._post("/write_file", {"path": path, "content": content}, timeout_s)

    def _post(self, path: str, body: Any, timeout_s: float) -> dict[str, Any]:
        return asyncio.run(self._exchange(path, body, timeout_s))

    async def _exchange(self, path: str, body: Any, timeout_s: float) -> dict[str, Any]:
        end, failures, pause = time.monotonic() + timeout_s, 0, PAUSES_S[0]
        headers = {"X-Request-ID": str(uuid.uuid4())}
        async with self._http() as http:
            while True:
                start = time.monotonic()
                try:
                    left = max(end - start, 0.1)
                    response, data = await ask(http, "POST", self.url + path, body, left, headers)
                    if response.status_code not in REPEATED:
                        return self._read(path, response, data)
                    cause = f"HTTP {response.status_code}"
                except TimeoutError as error:
                    raise InfrastructureFault(f"{self.url}{path} gave no answer in {timeout_s:g} s") from error
                except httpx.TransportError as error:
                    cause = f"{type(error).__name__}: {error}".rstrip(": ")
                except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:  # no HTTP, or too long
                    raise InfrastructureFault(f"{self.url}{path}: {error}") from error
                failures, pause = (failures + 1, pause) if time.monotonic() - start < LONG_S else (0, PAUSES_S[0])
                if failures >= ATTEMPTS or time.monotonic() + pause >= end or not self._alive():
                    raise InfrastructureFault(f"{self.url} is lost: {one_line(cause, 200)}")
                await asyncio.sleep(pause)
                pause = min(2 * pause, PAUSES_S[1])

    async def _wait_until_alive(self, timeout_s: float) -> None:
        end, cause = time.monotonic() + timeout_s, "no time"
        async with self._http() as http:
            while self._alive() and (left := end - time.monotonic()) > 0:
                try:
                    response, data = await ask(http, "GET", f"{self.url}/is_alive", None, min(ALIVE_S, left))
                    if response.status_code == 200 and parse_json(data).get("is_alive") is True:
                        return
                    if response.status_code in (401, 403):
                        raise InfrastructureFault(f"{self.url} refuses the token: HTTP {response.status_code}")
                    cause = f"HTTP {response.status_code}"
                except (TimeoutError, httpx.HTTPError, httpx.InvalidURL, ValueError, AttributeError) as error:
                    cause = f"{type(error).__name__}: {error}".rstrip(": ")
                await asyncio.sleep(min(PAUSES_S[0], max(0.0, end - time.monotonic())))
        why = f"did not answer in {timeout_s:.3g} s" if self._alive() else "is gone: its program has ended"
        raise InfrastructureFault(f"{self.url} {why}; the last: {one_line(cause, 200)}")

    def _read(self, path: str, response: httpx.Response, data: bytes) -> dict[str, Any]:
        """Returns the object of a reply, or raises the server's exception."""
        if response.status_code not in (200, FAILED):
            text = error_text(response, data)
            raise InfrastructureFault(f"{self.url}{path}: HTTP {response.status_code}: {text}")
        try:
            reply = parse_json(data)
        except Malformed as error:
            raise InfrastructureFault(f"{self.url}{path} did not answer in JSON: {error}") from error
        if response.status_code == FAILED:
            failure = reply.get("swerexception") if isinstance(reply, dict) else None
            about = failure if isinstance(failure, dict) else {}
            kind, message = str(about.get("class_path")).rpartition(".")[2], one_line(str(about.get("message")), 300)
            if kind == LATE:
                raise CommandLate(message)
            if kind in REFUSALS:
                raise CommandRefused(message)
            raise InfrastructureFault(f"{self.url}{path}: the server failed: {kind}: {message}")
        if not isinstance(reply, dict):
            raise InfrastructureFault(f"{self.url}{path} answered no JSON object")
        return reply

    def _http(self) -> httpx.AsyncClient:
        host = urlsplit(self.url).hostname or ""
        # the machine's proxies are meant for other machines
        proxies = host not in LOOPBACK
        return httpx.AsyncClient(headers={"X-API-Key": self._token}, trust_env=proxies, verify=_tls())


@lru_cache(maxsize=1)
def _tls() -> SSLContext:
    """Returns the settings of TLS, with the machine's certificates; made once, as loading them is slow."""
    return httpx.create_ssl_context()
