"""HTTP to an inference server: JSON with bounded waits and sizes, and streams of server-sent events."""

from __future__ import annotations

import ipaddress
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx

from skyrl_mega.common.replies import MOST_BYTES, NoAnswer, Retries, ask, ask_again, error_text
from skyrl_mega.common.safe_read import Malformed, parse_json
from skyrl_mega.engines.external.server import ServerAddress, ServerGone, ServerRefused

CONNECT_S = 10.0
"""Seconds to open a connection."""
ASK_S = 30.0
"""Seconds for a short question."""
QUESTIONS = Retries(first_pause_s=0.2, longest_pause_s=2.0, attempts=3)
"""Retries of questions, which change nothing at the server."""
DATA = b"data:"
"""Start of a line with an event."""
PLAIN = {"Accept-Encoding": "identity"}
"""Headers of a streamed request: its answer is not compressed."""


class HttpServer:
    """A connection pool to a server. Belongs to a single event loop.

    Args:
        address: The server.
    """

    def __init__(self, address: ServerAddress) -> None:
        self.address = address
        connections = address.concurrency + 8
        self.http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {address.token}"} if address.token else {},
            limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
            timeout=httpx.Timeout(None, connect=CONNECT_S),
            trust_env=not is_loopback_url(address.url),
        )

    async def get(self, path: str) -> Any:
        """Asks a question, with retries, and returns the JSON answer; None for an empty answer.

        Raises:
            ServerRefused: The server answered with a status below 500 other than 200 and those of
                `common.replies.RETRIED`, such as 429.
            ServerGone: The server did not answer, answered with a status from 500 on or of `RETRIED` in every try, or
                not with JSON.
        """
        url = self.address.url + path
        try:
            response, data = await ask_again(self.http, "GET", url, None, ASK_S, retries=QUESTIONS)
            return self._answer(path, response, data)
        except NoAnswer as error:
            raise ServerGone(self.hidden(f"GET {url} got no answer: {error}")) from None
        except (Malformed, httpx.DecodingError) as error:
            raise ServerGone(f"GET {url}: {error}") from None

    async def post(self, path: str, body: Any, seconds: float) -> Any:
        """Sends a command once and returns the JSON answer; None for an empty answer.

        Args:
            path: Path at the server, with the query.
            body: Sent as JSON; None sends no body.
            seconds: Time limit.

        Raises:
            ServerRefused: The server answered with a status below 500 that is not 200.
            ServerGone: The server did not answer within `seconds`, answered with a status from 500 on, or not with
                JSON.
        """
        url = self.address.url + path
        try:
            response, data = await ask(self.http, "POST", url, body, seconds)
        except TimeoutError:
            raise ServerGone(f"POST {url} got no complete answer in {seconds:g} s") from None
        except (httpx.HTTPError, Malformed) as error:
            raise ServerGone(self.hidden(f"POST {url}: {type(error).__name__} {error}")) from None
        return self._answer(path, response, data)

    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Sends a request and yields the JSON objects of the answer's events until `[DONE]` or its end. Has no time
        limit besides that of the connection; closing the iterator ends the request. A connection that was lost before
        any answer, as an idle one may be, is opened once more.

        Args:
            path: Path at the server, with the query.
            body: Sent as JSON.

        Raises:
            ServerRefused: The server refused the request.
            ServerGone: The connection failed, the server had an error, or an event is no JSON object or too long.
        """
        url = self.address.url + path
        for attempt in (1, 2):
            answered = False
            try:
                async with self.http.stream("POST", url, json=body, headers=PLAIN) as response:
                    answered = True
                    if response.status_code != 200:
                        self._answer(path, response, b"".join([piece async for piece in bounded(response)]))
                    async for event in events(response):
                        if "error" in event:
                            raise self._error(path, event["error"])
                        yield event
                return
            except (httpx.HTTPError, Malformed) as error:
                if answered or attempt == 2 or not isinstance(error, httpx.NetworkError | httpx.RemoteProtocolError):
                    raise ServerGone(self.hidden(f"POST {url}: {type(error).__name__} {error}")) from None

    def _error(self, path: str, error: Any) -> Exception:
        """Returns the exception for an error sent as an event."""
        code = error.get("code") if isinstance(error, dict) else None
        text = self.hidden(f"{path}: {str(error.get('message') if isinstance(error, dict) else error)[:300]}")
        return ServerRefused(text) if isinstance(code, int) and 400 <= code < 500 else ServerGone(text)

    def _answer(self, path: str, response: httpx.Response, data: bytes) -> Any:
        if response.status_code >= 500:
            raise ServerGone(self.hidden(f"{path}: HTTP {response.status_code}: {error_text(response, data)}"))
        if response.status_code != 200:
            raise ServerRefused(self.hidden(f"{path}: HTTP {response.status_code}: {error_text(response, data)}"))
        if not data.strip():
            return None
        try:
            return parse_json(data)
        except Malformed as error:
            raise ServerGone(f"{path}: the answer is no JSON: {error}") from None

    def hidden(self, text: str) -> str:
        """Returns `text` with the API key, which a server may repeat, replaced by `***`."""
        return text.replace(self.address.token, "***") if self.address.token else text


async def bounded(response: httpx.Response) -> AsyncIterator[bytes]:
    """Yields the pieces of an answer; raises Malformed beyond `MOST_BYTES` in all."""
    size = 0
    async for piece in response.aiter_raw():
        size += len(piece)
        if size > MOST_BYTES:
            raise Malformed(f"the answer has more than {MOST_BYTES} bytes")
        yield piece


async def events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """Yields the JSON objects of server-sent events until `[DONE]` or the end of the answer; other lines are skipped.
    Raises Malformed for an event that is no JSON object, or too long."""
    async for line in lines(response):
        if not line.startswith(DATA):
            continue
        text = line.removeprefix(DATA).strip()
        if text == b"[DONE]":
            return
        event = parse_json(text)
        if not isinstance(event, dict):
            raise Malformed("an event is no JSON object")
        yield event


async def lines(response: httpx.Response) -> AsyncIterator[bytes]:
    """Yields the lines of a streamed answer; raises Malformed for a line beyond MOST_BYTES."""
    rest = bytearray()
    async for piece in response.aiter_raw():
        rest += piece
        if len(rest) > MOST_BYTES:
            raise Malformed(f"an event has more than {MOST_BYTES} bytes")
        *complete, last = rest.split(b"\n")
        for line in complete:
            yield bytes(line)
        rest = bytearray(last)
    if rest:
        yield bytes(rest)


def is_loopback_url(url: str) -> bool:
    """Returns True if the host of an address is this machine by name (`localhost`) or number, which no proxy serves.
    Raises httpx.InvalidURL for an address that is none."""
    host = httpx.URL(url).host
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
