"""Requests to services: replies bounded in bytes after decompression and in seconds, and bounded retries."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from skyrl_mega.common.safe_read import Malformed, parse_json
from skyrl_mega.common.terminal import one_line

MOST_BYTES = 64 * 2**20
"""Maximum bytes of a reply after decompression."""
ENCODINGS = ("identity", "gzip", "deflate")
"""Accepted encodings. A byte decompresses to at most 1,032 bytes, so a piece from the socket stays below 70 MiB."""


RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
"""Statuses of a reply that are worth a retry, as is a lost connection."""
LONGEST_ASKED_S = 60.0
"""Longest pause accepted on a service's demand (`Retry-After`)."""


@dataclass(frozen=True)
class Retries:
    """Limits of a request's retries."""

    first_pause_s: float
    longest_pause_s: float
    """Pauses double from the first to the longest; the client waits for a random part of a pause, at least half."""
    attempts: float = math.inf
    """Maximum number of attempts, including the first."""
    total_s: float = math.inf
    """Seconds for all attempts and pauses."""


class NoAnswer(Exception):
    """Failure of every attempt of a request. The text is the cause of the last attempt's failure.

    Attributes:
        attempts: Number of attempts.
    """

    def __init__(self, cause: str, attempts: int) -> None:
        super().__init__(cause)
        self.attempts = attempts


async def ask_again(
    http: httpx.AsyncClient, verb: str, url: str, body: Any, timeout_s: float, *, retries: Retries
) -> tuple[httpx.Response, bytes]:
    """Sends a request, with retries; returns the response and the bytes of the first reply with a final status.

    Retries after a status in `RETRIED`, a lost connection or a timeout, with growing pauses; the service may therefore
    process the same request several times. Every other status is final, errors such as 404 included. At least one
    attempt is made.

    Args:
        http: Client with the connections.
        verb: `GET` or `POST`.
        url: Address of the request.
        body: Sent as JSON; None sends no body.
        timeout_s: Seconds for an attempt.
        retries: Limits of the retries.

    Raises:
        NoAnswer: The attempts or the time are used up.
        Malformed: The reply exceeds MOST_BYTES, or uses another encoding.
        httpx.DecodingError: The reply's compressed bytes are broken.
        httpx.InvalidURL: `url` is no address.
    """
    end, pause, attempts = time.monotonic() + retries.total_s, retries.first_pause_s, 0
    while True:
        attempts, asked, limit = attempts + 1, 0.0, max(min(end - time.monotonic(), timeout_s), 0.01)
        try:
            response, data = await ask(http, verb, url, body, limit)
            if response.status_code not in RETRIED:
                return response, data
            cause, asked = f"HTTP {response.status_code}: {error_text(response, data)}", _retry_after(response)
        except TimeoutError:
            cause = f"no complete answer in {limit:.3g} s"
        except httpx.TransportError as error:
            cause = f"{type(error).__name__}: {error}".rstrip(": ")
        # random, so that many clients do not retry at the same moment
        rest = max(min(asked, LONGEST_ASKED_S), pause * random.uniform(0.5, 1.0))
        if attempts >= retries.attempts or time.monotonic() + rest >= end:
            raise NoAnswer(cause, attempts)
        await asyncio.sleep(rest)
        pause = min(2 * pause, retries.longest_pause_s)


def error_text(response: httpx.Response, data: bytes) -> str:
    """Returns the error message of a reply as a single line of at most 300 characters.

    Uses `error.message` and `error.code` of a JSON reply, else the start of the reply's text; for an empty reply the
    name of its status, such as `Not Found`.
    """
    try:
        body = parse_json(data)
        error = body.get("error", body)
        text = f"{error.get('message', error)} {error.get('code') or ''}" if isinstance(error, dict) else str(error)
    except (Malformed, AttributeError):
        text = data[:2000].decode(errors="replace") or response.reason_phrase
    return one_line(text, 300)


def _retry_after(response: httpx.Response) -> float:
    """Returns the delay in seconds asked for by a service; 0 if absent or a date."""
    try:
        seconds = float(response.headers.get("Retry-After", "0"))
    except ValueError:
        return 0.0
    return seconds if 0 <= seconds < math.inf else 0.0


async def ask(
    http: httpx.AsyncClient,
    verb: str,
    url: str,
    body: Any,
    timeout_s: float,
    headers: Mapping[str, str] | None = None,
) -> tuple[httpx.Response, bytes]:
    """Sends a request once; returns the response and the bytes of the reply, whatever its status.

    Args:
        http: Client with the connections.
        verb: `GET` or `POST`.
        url: Address of the request.
        body: Sent as JSON; None sends no body.
        timeout_s: Seconds for the whole exchange: connection, request and complete reply.
        headers: Further headers of the request; None adds none.

    Raises:
        TimeoutError: The reply was not complete within `timeout_s`.
        Malformed: The reply exceeds MOST_BYTES, or uses another encoding.
        httpx.HTTPError: The connection failed, or the reply is not HTTP.
        httpx.InvalidURL: `url` is no address.
    """
    data = bytearray()
    accepted = {"Accept-Encoding": "gzip, deflate"}
    async with (
        asyncio.timeout(timeout_s),
        http.stream(verb, url, json=body, headers={**(headers or {}), **accepted}, timeout=None) as response,
    ):
        encoding = response.headers.get("Content-Encoding", "identity").lower()
        if encoding not in ENCODINGS:  # chained encodings multiply the size
            raise Malformed(f"it is packed as {encoding[:80]}; allowed: {', '.join(ENCODINGS)}")
        async for piece in response.aiter_bytes():
            data += piece
            if len(data) > MOST_BYTES:
                raise Malformed(f"it has more than {MOST_BYTES} bytes")
    return response, bytes(data)
