"""The process behind the live page: sends bytes rendered from the run's folder, and ends with the run.

    python -m skyrl_mega.report.live.server FOLDER SOCKET     token and a line end on standard input

GET /              the report, which follows the run by `/state.json`
GET /state.json    progress and alarms
GET /metrics       Prometheus

The process has the lowest priority and is the first victim of a lack of memory. A request beyond `RATE` waits half a
second for a 429; the wait also bounds the requests of each connection.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import Any

import uvicorn

from skyrl_mega.report.live import prometheus
from skyrl_mega.report.live.access import Allowance, Guard
from skyrl_mega.report.live.snapshot import SHARE, Follower
from skyrl_mega.retriever.connections import TimeLimitedProtocol

LOOK_EVERY_S = 2.0
"""Seconds between looks at the run's folder."""
VIEWER_S = 10.0
"""Seconds of a viewer's presence after a request."""
LINGER_S = 4.0
"""Seconds for present viewers to fetch the end of the run."""
RATE, BURST = 40.0, 80.0
"""Requests per second with the token, of all viewers together; a viewer sends one in three seconds."""
STRANGERS_RATE, STRANGERS_BURST = 10.0, 20.0
"""Requests per second without the token."""
WAIT_S = 0.5
"""Seconds until a request beyond the rates is refused."""
HEADERS = (
    (b"cache-control", b"no-store"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"content-security-policy", b"frame-ancestors 'none'; base-uri 'none'; form-action 'none'"),
)
"""Headers of every reply; the page contains a stricter policy."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class LivePage:
    """The web application (ASGI) of the live page.

    Args:
        follower: Renders the content.
        guard: Checks the token.
    """

    def __init__(self, follower: Follower, guard: Guard) -> None:
        self.follower, self.guard = follower, guard
        self.allowed = Allowance(RATE, BURST)
        self.allowed_strangers = Allowance(STRANGERS_RATE, STRANGERS_BURST)
        self.last_viewer = float("-inf")
        """Time of the last request with the token."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers an HTTP request (ASGI) with a single reply; ignores other protocols. The token admits by cookie or
        bearer header; a token in the address gives 303 to the same path, with the cookie. Else 401 without the token,
        404 for another path than `/`, `/state.json` and `/metrics`, 405 for another method than GET or HEAD, 429 after
        a pause above the rate limit, and 503 before the first snapshot."""
        if scope["type"] != "http":
            return
        headers = dict(scope["headers"])
        with_token, in_query = self.guard.admits(headers), self.guard.admits_query(scope["query_string"])
        if not (self.allowed if with_token or in_query else self.allowed_strangers).take():
            await asyncio.sleep(WAIT_S)
            return await _reply(send, 429, b"too many requests\n", (b"retry-after", b"1"))
        if scope["method"] not in ("GET", "HEAD"):
            return await _reply(send, 405, b"allowed: GET\n", (b"allow", b"GET, HEAD"))
        if scope["path"] == "/favicon.ico":  # asked for by browsers
            return await _reply(send, 204, b"")
        if in_query:  # out of the address, and of the browser's history
            path = scope["path"].encode() if scope["path"] in self.places else b"/"
            moved = (b"location", path), (b"set-cookie", self.guard.set_cookie())
            return await _reply(send, 303, b"", *moved)
        if not with_token:
            return await _reply(send, 401, NO_TOKEN, HTML, (b"www-authenticate", b"Bearer"))
        self.last_viewer = time.monotonic()
        place = self.places.get(scope["path"])
        if place is None:
            return await _reply(send, 404, b"no such path; the page is at /\n")
        return await place(send, headers)

    @property
    def places(self) -> Mapping[str, Callable[[Send, Mapping[bytes, bytes]], Awaitable[None]]]:
        """Path (`/`, `/state.json` or `/metrics`) → function that sends the reply."""
        return {"/": self._page, "/state.json": self._state, "/metrics": self._metrics}

    async def _page(self, send: Send, headers: Mapping[bytes, bytes]) -> None:
        newest = self.follower.newest
        if newest is None:
            text = f"the run's folder cannot be read yet: {escape(self.follower.problem)}"
            return await _reply(send, 503, f"<meta http-equiv=refresh content=3>{text}".encode(), HTML)
        if b"gzip" in headers.get(b"accept-encoding", b""):
            return await _reply(send, 200, newest.zipped_page, HTML, (b"content-encoding", b"gzip"))
        return await _reply(send, 200, newest.page, HTML)

    async def _state(self, send: Send, headers: Mapping[bytes, bytes]) -> None:
        newest = self.follower.newest
        if newest is None:
            return await _reply(send, 503, b"{}", JSON)
        values = {"version": newest.version, "problem": self.follower.problem, **newest.state.at(time.time())}
        return await _reply(send, 200, json.dumps(values).encode(), JSON)

    async def _metrics(self, send: Send, headers: Mapping[bytes, bytes]) -> None:
        newest = self.follower.newest
        if newest is None:
            return await _reply(send, 503, b"")
        return await _reply(send, 200, newest.metrics, (b"content-type", prometheus.CONTENT_TYPE.encode()))


HTML = b"content-type", b"text/html; charset=utf-8"
JSON = b"content-type", b"application/json"
NO_TOKEN = b"""<!DOCTYPE html><meta charset=utf-8><title>token needed</title>
<p>This page needs the token of the run: open the address that the run printed, or add <code>?token=</code> and the
content of <code>page.token</code> in the run's folder. Prometheus sends it as a bearer token.</p>
"""


async def _reply(send: Send, status: int, body: bytes, *headers: tuple[bytes, bytes]) -> None:
    length = b"content-length", str(len(body)).encode()
    await send({"type": "http.response.start", "status": status, "headers": [length, *headers, *HEADERS]})
    await send({"type": "http.response.body", "body": body})


async def serve(
    listening: socket.socket, follower: Follower, token: str, ending: threading.Event | None = None
) -> None:
    """Serves the page until SIGTERM or SIGINT, or until `ending` is set and present viewers had time (`LINGER_S`) to
    fetch the last state.

    Args:
        listening: Bound and listening socket.
        follower: Makes the snapshots of the run that the page shows.
        token: Access token; requests without it are refused.
        ending: Set at the end of the run, by another thread; None serves until a signal.
    """
    ending = ending or threading.Event()
    app = LivePage(follower, Guard(token, listening.getsockname()[1]))
    settings = uvicorn.Config(
        app,
        http=TimeLimitedProtocol,
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(settings)
    await asyncio.to_thread(follower.look)  # connections wait meanwhile
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    while not (ending.is_set() or serving.done()):
        await asyncio.to_thread(follower.look)
        cost_s = follower.newest.seconds if follower.newest else 0.0
        await _either(serving, ending, max(LOOK_EVERY_S, SHARE * cost_s))
    if not serving.done():
        await asyncio.to_thread(follower.look)
        if time.monotonic() - app.last_viewer < VIEWER_S:
            await _either(serving, threading.Event(), LINGER_S)
        server.should_exit = True
    await serving


async def _either(serving: asyncio.Task[None], ending: threading.Event, seconds: float) -> None:
    """Waits for the end of serving, for the end of the run, or until the time is up."""
    end = time.monotonic() + seconds
    while not (serving.done() or ending.is_set()) and time.monotonic() < end:
        await asyncio.sleep(0.2)


def yield_to_the_run() -> None:
    """Gives this process the lowest CPU priority, and makes it the first to be killed if memory runs out."""
    os.setpriority(os.PRIO_PROCESS, 0, 19)
    with suppress(OSError):  # no /proc, or a stricter value
        Path("/proc/self/oom_score_adj").write_text("1000")


def main(folder: Path, descriptor: int) -> None:
    """Serves the live page of a run as a child process of the run, until standard input ends, on the inherited
    listening socket with the file descriptor `descriptor`.

    Standard input begins with a line with the token.

    A byte on standard input announces the end of the run, and viewers may still fetch the last state. The end of
    standard input alone means the death of the driver, and this process ends at once.
    """
    yield_to_the_run()
    token = _line(0)
    ending = threading.Event()

    def wait_for_end() -> None:
        if not os.read(0, 1):
            os._exit(0)
        ending.set()

    threading.Thread(target=wait_for_end, name="end", daemon=True).start()
    with socket.socket(fileno=descriptor) as listening:
        asyncio.run(serve(listening, Follower(folder, lambda: not ending.is_set()), token, ending))


def _line(descriptor: int) -> str:
    """Returns the first line of an input, without reading ahead: a thread reads the rest."""
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(descriptor, 1)):
        line += byte
    return line.decode().strip()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
