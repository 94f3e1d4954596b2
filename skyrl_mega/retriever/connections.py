"""How long and how much a client may keep the service waiting before its request is whole."""

from __future__ import annotations

import asyncio
import resource
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

RECEIVE_S = 20.0
"""From a connection's opening, or a request's first byte, to the request's last."""
HEADER_BYTES = 64 * 1024
CONNECTIONS = max(16, min(512, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2))
"""At once. Past it the one that has been waited for longest is closed, so that one that is quick always gets in."""


class Bounded(AutoHTTPProtocol):  # type: ignore[misc, valid-type]  # uvicorn chooses the class when it is imported
    """uvicorn's protocol, which by itself waits for ever for the rest of a request."""

    waiting: dict[Bounded, None] = {}  # noqa: RUF012  one for all connections, in the order in which they began to wait

    def connection_made(self, transport: Any) -> None:
        """Begins to wait."""
        super().connection_made(transport)
        self._limit: asyncio.TimerHandle | None = None
        self._received = 0
        if len(self.connections) > CONNECTIONS:
            next(iter(self.waiting), self).transport.abort()
        self._wait()

    def data_received(self, data: bytes) -> None:
        """Goes on waiting, in the same time, unless the request is whole."""
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
        """One that is kept for a next request is the first to go where there are too many; uvicorn closes it in 5 s."""
        super().on_response_complete()
        if self.timeout_keep_alive_task is not None:
            self.waiting[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        """Waits no more."""
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
