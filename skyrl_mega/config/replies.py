"""Bounded reading of service replies: a limit on bytes after decompression, and on seconds for the whole exchange."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

from skyrl_mega.config.safe_read import Malformed

MOST_BYTES = 64 * 2**20
"""Maximum bytes of a reply after decompression."""
ENCODINGS = ("identity", "gzip", "deflate")
"""Accepted encodings. A byte decompresses to at most 1,032 bytes, so a piece from the socket stays below 70 MiB."""


async def ask(
    http: httpx.AsyncClient, verb: str, url: str, body: Any, timeout_s: float
) -> tuple[httpx.Response, bytes]:
    """Sends a request; returns the response and the bytes of the reply.

    Args:
        http: Client with the connections.
        verb: `GET` or `POST`.
        url: Address of the request.
        body: Sent as JSON; None sends no body.
        timeout_s: Seconds for the whole exchange: connection, request and complete reply.

    Raises:
        TimeoutError: The reply was not complete in time.
        Malformed: The reply exceeds MOST_BYTES, or uses another encoding.
        httpx.HTTPError: The connection failed, or the reply is not HTTP.
    """
    data = bytearray()
    headers = {"Accept-Encoding": "gzip, deflate"}
    async with (
        asyncio.timeout(timeout_s),
        http.stream(verb, url, json=body, headers=headers, timeout=None) as response,
    ):
        encoding = response.headers.get("Content-Encoding", "identity").lower()
        if encoding not in ENCODINGS:  # chained encodings multiply the size
            raise Malformed(f"it is packed as {encoding[:80]}; allowed: {', '.join(ENCODINGS)}")
        async for piece in response.aiter_bytes():
            data += piece
            if len(data) > MOST_BYTES:
                raise Malformed(f"it has more than {MOST_BYTES} bytes")
    return response, bytes(data)
