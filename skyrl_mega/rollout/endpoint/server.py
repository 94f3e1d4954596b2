"""The HTTP server between agents and the policy: one per process, with a thread and an event loop of its own.

The server listens on loopback, at any free port. Every trajectory with an agent gets a key. A request with the key goes
to the trajectory's session, in the event loop of the rollouts. A request without a key gets 401, and its body is not
stored.
"""

from __future__ import annotations

import asyncio
import hashlib
import resource
import secrets
import socket
import threading
from functools import lru_cache, partial

import uvicorn

from skyrl_mega.cluster.driver import OPEN_FILES, allow_open_files
from skyrl_mega.envs.agent import AgentEndpoint
from skyrl_mega.retriever.connections import TimeLimitedProtocol
from skyrl_mega.rollout.endpoint.app import MODEL, EndpointApp
from skyrl_mega.rollout.endpoint.door import AgentDoor
from skyrl_mega.rollout.endpoint.requests import EndpointSession

BACKLOG = 2048
"""Connections accepted in advance by the kernel."""
IDLE_S = 30.0
"""Seconds until an unused connection is closed. Clients reuse connections for a shorter time, so no request meets a
closing connection."""
END_S = 5.0
"""Seconds for the server's thread to end."""


class EndpointProtocol(TimeLimitedProtocol):
    """Connections of agents. Waiting for the policy has no time limit."""

    waiting: dict[TimeLimitedProtocol, None] = {}  # noqa: RUF012  shared by all connections, as in the base class

    @property
    def most_connections(self) -> int:
        """Half of the process's limit of open files, at least 16; half of `OPEN_FILES` without a limit. Agents of a
        thousand trajectories connect at once."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return OPEN_FILES // 2 if soft == resource.RLIM_INFINITY else max(16, soft // 2)


class EndpointServer:
    """The server of a process. It starts with the first `open`. All methods may be called from any thread, and do not
    wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._doors: dict[bytes, AgentDoor] = {}
        """Hash of a key → the key's door."""
        self._thread: threading.Thread | None = None
        self._url = ""

    def open(self, session: EndpointSession, loop: asyncio.AbstractEventLoop, key: str | None = None) -> AgentEndpoint:
        """Opens an endpoint for a session and returns its address and key. The caller closes the endpoint.

        Args:
            session: Answers the requests.
            loop: Event loop in which the session's methods run.
            key: Key of the endpoint, not used by another open endpoint; None draws a random key.
        """
        with self._lock:
            if self._thread is None:
                self._start()
            key = key or f"sk-{secrets.token_urlsafe(32)}"
            door = AgentDoor(session, loop)
            self._doors[key_hash(key)] = door
        return AgentEndpoint(self._url, key, MODEL, serve=partial(self._accept, door))

    def close(self, endpoint: AgentEndpoint) -> None:
        """Closes an endpoint: its key is refused from now on, its requests under way are cancelled and get
        `SessionEnded`, and its further sockets are closed. Does nothing for an endpoint closed before."""
        with self._lock:
            door = self._doors.pop(key_hash(endpoint.key), None)
        if door is not None:
            door.close()

    def accept(self, endpoint: AgentEndpoint, listening: socket.socket) -> None:
        """Serves an endpoint on a further listening socket, until the endpoint is closed. Other endpoints' keys are
        refused there. The server owns the socket, and closes the socket at once if the endpoint is already closed."""
        with self._lock:
            door = self._doors.get(key_hash(endpoint.key))
        if door is None:
            listening.close()
        else:
            self._accept(door, listening)

    def stop(self) -> None:
        """Closes all endpoints and ends the server's thread; waits at most twice `END_S` seconds for the thread. Does
        nothing if the server does not run; a later `open` starts the server again."""
        with self._lock:
            doors, self._doors = list(self._doors.values()), {}
            thread, self._thread = self._thread, None
        for door in doors:
            door.close()
        if thread is not None:
            self._http.should_exit = True
            thread.join(2 * END_S)

    def _start(self) -> None:
        allow_open_files()
        listening = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
        self._url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        self._http = uvicorn.Server(
            uvicorn.Config(
                EndpointApp(self._door_of),
                http=EndpointProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="critical",  # a client's broken HTTP is no matter for the run's terminal
                access_log=False,
                server_header=False,
                timeout_keep_alive=int(IDLE_S),
                timeout_graceful_shutdown=int(END_S),
            )
        )
        self._http.config.load()
        self._loop = asyncio.new_event_loop()
        work = partial(self._loop.run_until_complete, self._http.serve(sockets=[listening]))
        self._thread = threading.Thread(target=work, name="agent endpoint", daemon=True)
        self._thread.start()

    def _door_of(self, key: str) -> AgentDoor | None:
        return self._doors.get(key_hash(key))

    def _accept(self, door: AgentDoor, listening: socket.socket) -> None:
        asyncio.run_coroutine_threadsafe(self._serve_on(door, listening), self._loop)

    async def _serve_on(self, door: AgentDoor, listening: socket.socket) -> None:
        """Serves a door on a socket, in the server's loop."""
        protocol = partial(
            EndpointProtocol,
            config=self._http.config,
            server_state=self._http.server_state,
            app_state={"door": door},
        )
        serving = await self._loop.create_server(protocol, sock=listening, backlog=BACKLOG)
        door.at_close(lambda: self._loop.call_soon_threadsafe(serving.close))


def key_hash(key: str) -> bytes:
    """Returns the SHA-256 of a key, under which the server keeps the key's door. The time of a comparison of hashes
    tells nothing about the right key."""
    return hashlib.sha256(key.encode()).digest()


@lru_cache(maxsize=1)
def server() -> EndpointServer:
    """Returns the server of the process, always the same object; nothing listens before its first `open`."""
    return EndpointServer()
