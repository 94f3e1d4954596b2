"""Limits on the time and size of incomplete requests, which would otherwise occupy the service."""

from __future__ import annotations

import asyncio
import resource
import socket
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

RECEIVE_S = 20.0
"""Seconds until a request must be complete, from the opening of the connection or the request's first byte."""
HEADER_BYTES = 64 * 1024
"""Maximum size of a request's headers."""
CONNECTIONS = max(16, min(512, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2))
"""Maximum number of connections. Above this the connection with the longest wait is closed, so a fast client always
gets in."""


class TimeLimitedProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]  # uvicorn chooses the class when it is imported
    """uvicorn's protocol with a time limit; uvicorn itself waits for ever for the rest of a request."""

    waiting: dict[TimeLimitedProtocol, None] = {}  # noqa: RUF012  shared by all connections, ordered by the start of waiting

    @property
    def most_connections(self) -> int:
        """Maximum number of connections."""
        return CONNECTIONS

    def connection_made(self, transport: Any) -> None:
        """Starts the time limit; closes the longest-waiting connection if there are too many."""
        super().connection_made(transport)
        # A reply's head and body are separate packets, and the second must not wait for the first's acknowledgement,
        # which takes 40 ms. asyncio sets this only for sockets created with the protocol's number.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._limit: asyncio.TimerHandle | None = None
        self._received = 0
        if len(self.connections) > self.most_connections:
            next(iter(self.waiting), self).transport.abort()
        self._wait()

    def data_received(self, data: bytes) -> None:
        """Passes the bytes to uvicorn. Stops the time limit if the request is complete; otherwise the limit keeps
        running, and starts with the first byte of a further request. Closes a connection with headers of more than
        `HEADER_BYTES`."""
        self._received += len(data)
        super().data_received(data)
        if self._whole():
            self._stop()
            return
        headers_missing = self.cycle is None or self.cycle.response_complete
        if headers_missing and self._received > HEADER_BYTES:
            self.transport.abort()
            return
        if self._limit is None:
            self._wait()

    def on_response_complete(self) -> None:
        """Adds a connection kept alive after an answer to the connections to close if there are too many, the longest
        waiting first. uvicorn closes the connection after 5 s without a request."""
        super().on_response_complete()
        if self.timeout_keep_alive_task is not None:
            self.waiting[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancels the time limit for receiving a request (`RECEIVE_S`)."""
        self._stop()
        super().connection_lost(exc)

    def _whole(self) -> bool:
        return self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete

    def _wait(self) -> None:
        self.waiting.pop(self, None)
        self.waiting[self] = None
        self._limit = self.loop.call_later(RECEIVE_S, self.transport.abort)

    def _stop(self) -> None:
        self.waiting.pop(self, None)
        self._received = 0
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None
