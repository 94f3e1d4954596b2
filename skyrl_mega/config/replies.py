"""Reading what services answer: bounded in bytes after unpacking, and in seconds from the first to the last byte."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

from skyrl_mega.config.outside import Malformed

MOST_BYTES = 64 * 2**20
"""Bytes of one reply, unpacked."""
UNPACKED = ("identity", "gzip", "deflate")
"""Encodings that are read: at most 1,032 bytes come out of one byte, so a piece from the socket stays below 70 MiB."""


async def ask(
    http: httpx.AsyncClient, verb: str, url: str, body: Any, timeout_s: float
) -> tuple[httpx.Response, bytes]:
    """Sends one request; returns the response and its bytes.

    Args:
        http: The client that holds the connections.
        verb: `GET` or `POST`.
        url: Where to.
        body: Sent as JSON; None sends no body.
        timeout_s: Seconds for all of it: the connection, the request and the last byte of the reply.

    Raises:
        TimeoutError: The reply was not complete in time.
        Malformed: It has more than MOST_BYTES, or is packed otherwise.
        httpx.HTTPError: No connection, or no HTTP.
    """
    data = bytearray()
    headers = {"Accept-Encoding": "gzip, deflate"}
    async with (
        asyncio.timeout(timeout_s),
        http.stream(verb, url, json=body, headers=headers, timeout=None) as response,
    ):
        encoding = response.headers.get("Content-Encoding", "identity").lower()
        if encoding not in UNPACKED:  # several in a row multiply
            raise Malformed(f"it is packed as {encoding[:80]}; allowed: {', '.join(UNPACKED)}")
        async for piece in response.aiter_bytes():
            data += piece
            if len(data) > MOST_BYTES:
                raise Malformed(f"it has more than {MOST_BYTES} bytes")
    return response, bytes(data)
