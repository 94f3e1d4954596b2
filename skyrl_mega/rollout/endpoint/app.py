"""The web application (ASGI) of the server: a request's key, path, body, dialect and reply."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from skyrl_mega.common.safe_read import Malformed, parse_json
from skyrl_mega.rollout.endpoint.anthropic_messages import MESSAGES
from skyrl_mega.rollout.endpoint.dialect import (
    HEAD_FIELDS,
    RETRIED,
    BodyTooLarge,
    Dialect,
    PolicyFault,
    ReplyHead,
    UnknownKey,
    UnknownPath,
    WrongMethod,
    status_of,
    to_json,
)
from skyrl_mega.rollout.endpoint.door import AgentDoor, result_of
from skyrl_mega.rollout.endpoint.openai_chat import CHAT
from skyrl_mega.rollout.endpoint.openai_responses import RESPONSES
from skyrl_mega.rollout.endpoint.requests import BadRequest, ChatRequest, PolicyReply, RequestError
from skyrl_mega.rollout.endpoint.token_route import TOKENS

DIALECTS: Mapping[str, Dialect] = {
    "/v1/chat/completions": CHAT,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
    "/inference/v1/generate": TOKENS,
}
"""Path → dialect."""
COUNT = "/v1/messages/count_tokens"
MODELS = "/v1/models"
MODEL = "policy"
"""The model's name; requests may give any other."""
KEEP_ALIVE_S = 5.0
"""Seconds until a stream begins without the reply, and between its signs of life. An earlier error gets an HTTP status;
a later error is an event of the stream."""
BODY_BYTES = 4 * 2**20
"""Maximum size of a request's body."""
LARGE_BYTES = 256 * 1024
"""Size of a body above which a thread reads the JSON: other requests go on meanwhile."""
MOST_VALUES = 2**19
"""Maximum number of values in a large body."""
STRINGS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
"""Strings of a JSON text. The end is optional, and nothing is tried twice: the time is linear for any bytes."""
SKIPPED_BYTES = 256 * 2**20
"""Maximum number of bytes read of a refused body. Clients send the whole body before reading the refusal."""
JSON = (b"content-type", b"application/json")
STREAM = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"))

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
log = logging.getLogger(__name__)


def parse_body(data: bytes) -> Mapping[str, Any]:
    """Returns the JSON object of a body.

    Raises:
        BadRequest: The body is no JSON object, has more than `BODY_BYTES` bytes, or has more than `LARGE_BYTES` bytes
            and `MOST_VALUES` values.
    """
    if len(data) > LARGE_BYTES:
        marks = STRINGS.sub(b"", data)
        if sum(marks.count(mark) for mark in (b",", b"[", b"{")) > MOST_VALUES:
            raise BadRequest(f"the body has more than {MOST_VALUES} values")
    try:
        value = parse_json(data, most=BODY_BYTES)
    except Malformed as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadRequest("the body is not a JSON object")
    return value


def reply_head(body: Mapping[str, Any]) -> ReplyHead:
    """Returns a new reply head for a request: a random id, the present time, and the fields `HEAD_FIELDS` of the
    request's body."""
    kept = {name: body[name] for name in HEAD_FIELDS if name in body}
    return ReplyHead(secrets.token_hex(12), int(time.time()), kept)


class ClientGone(Exception):
    """The end of the connection by the client."""


class EndpointApp:
    """The web application.

    Args:
        door_of: Returns the door of a key, or None for a key without a running trajectory.
    """

    def __init__(self, door_of: Callable[[str], AgentDoor | None]) -> None:
        self._door_of = door_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers an HTTP request (ASGI); ignores other protocols. An error is not raised but sent as a reply; a client
        that closed the connection gets none."""
        if scope["type"] != "http":
            return
        headers = dict(scope["headers"])
        exchange = _Exchange(_dialect(scope["path"], headers), receive, send)
        try:
            await self._answer(exchange, scope, headers)
        except ClientGone:
            pass
        except RequestError as error:
            await exchange.refuse(error)
        except Exception:
            log.exception("a request of an agent failed")
            await exchange.refuse(PolicyFault("the endpoint failed; the run's log says why"))

    async def _answer(self, exchange: _Exchange, scope: Scope, headers: Mapping[bytes, bytes]) -> None:
        door = self._admitted(scope, headers)
        path, method = scope["path"].rstrip("/"), scope["method"]
        if path == MODELS or path.startswith(f"{MODELS}/"):
            _check_method(method, "GET")
            name = path.removeprefix(MODELS).removeprefix("/")
            return await exchange.send_json(200, _model(name) if name else _models())
        if path not in (*DIALECTS, COUNT):
            raise UnknownPath(f"{path}: allowed are {', '.join([*DIALECTS, COUNT, MODELS])}")
        _check_method(method, "POST")
        with door.enter() as take:
            body = await exchange.body(headers, take)
            await (exchange.count(door, body) if path == COUNT else exchange.answer(door, body))

    def _admitted(self, scope: Scope, headers: Mapping[bytes, bytes]) -> AgentDoor:
        """Returns the door of a request's key.

        Raises:
            UnknownKey: There is no such door, or the request came over the socket of another door.
        """
        kind, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        key = headers.get(b"x-api-key") or (bearer.strip() if kind.lower() == b"bearer" else b"")
        door = self._door_of(key.decode("latin-1")) if key else None
        if door is None or scope["state"].get("door", door) is not door:
            raise UnknownKey("no running trajectory has this key")
        return door


class _Exchange:
    """An HTTP request and its reply, in a dialect."""

    def __init__(self, dialect: Dialect, receive: Receive, send: Send) -> None:
        self.dialect, self._receive, self._send = dialect, receive, send
        self._whole = False
        """True if the whole body was received."""
        self._head: ReplyHead | None = None
        """Head of the stream; None before the stream begins."""

    async def body(self, headers: Mapping[bytes, bytes], take: Callable[[int], None]) -> Mapping[str, Any]:
        """Returns the body of the request.

        Args:
            headers: Headers of the request.
            take: Called with the size of every part of the body (`AgentDoor.enter`).

        Raises:
            BadRequest: The body is no JSON object.
            BodyTooLarge: The body exceeds `BODY_BYTES`.
            TooManyRequests: As `take`.
        """
        too_large = BodyTooLarge(f"the body is larger than {BODY_BYTES} bytes")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > BODY_BYTES:
            raise too_large
        data = bytearray()
        while not self._whole:
            part = await self._part()
            take(len(part))
            data += part
            if len(data) > BODY_BYTES:
                raise too_large
        if len(data) > LARGE_BYTES:
            return await asyncio.to_thread(parse_body, bytes(data))
        return parse_body(bytes(data))

    async def _part(self) -> bytes:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        self._whole = not message.get("more_body", False)
        return message.get("body", b"")

    async def answer(self, door: AgentDoor, body: Mapping[str, Any]) -> None:
        """Asks the session and sends its reply. The session's method is cancelled if the client goes first."""
        stream = body.get("stream", False)
        if stream not in (True, False, None):
            raise BadRequest("stream: allowed are true and false")
        request = self.dialect.read(body)
        if self.dialect is RESPONSES and isinstance(request, ChatRequest):
            request = door.history.whole(body, request)
        head = reply_head(body)
        del body  # the wait for the policy may be long
        answer = asyncio.wrap_future(door.submit(request))
        gone = asyncio.ensure_future(self._gone())
        try:
            if stream:
                while not await _first(answer, gone, KEEP_ALIVE_S):
                    await self._keep_alive(head)
            else:
                await _first(answer, gone, None)
            replies = result_of(answer)
            if self.dialect is RESPONSES and isinstance(request, ChatRequest):
                door.history.keep(head, request, replies[0])
            await (
                self._send_stream(head, replies) if stream else self.send_json(200, self.dialect.write(head, replies))
            )
        finally:
            answer.cancel()
            gone.cancel()

    async def count(self, door: AgentDoor, body: Mapping[str, Any]) -> None:
        """Sends the number of tokens of a request's context, in Anthropic's form."""
        request = self.dialect.read(body)
        assert isinstance(request, ChatRequest)
        counting = asyncio.wrap_future(door.count(request))
        await asyncio.wait([counting])
        await self.send_json(200, {"input_tokens": result_of(counting)})

    async def _gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def _keep_alive(self, head: ReplyHead) -> None:
        opening = await self._begin_stream(head, None)
        await self._send_part(opening + self.dialect.keep_alive, more=True)

    async def _begin_stream(self, head: ReplyHead, replies: list[PolicyReply] | None) -> str:
        """Begins the stream once; returns the events to send first, "" for a running stream."""
        if self._head is not None:
            return ""
        self._head = head
        await self._send({"type": "http.response.start", "status": 200, "headers": STREAM})
        return self.dialect.opening(head, replies)

    async def _send_stream(self, head: ReplyHead, replies: list[PolicyReply]) -> None:
        events = self.dialect.events(head, replies)
        await self._send_part(await self._begin_stream(head, replies) + events, more=False)

    async def _send_part(self, text: str, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": text.encode(), "more_body": more})

    async def send_json(self, status: int, value: Mapping[str, Any], *headers: tuple[bytes, bytes]) -> None:
        """Sends a reply with a JSON body."""
        data = to_json(value).encode()
        length = (b"content-length", str(len(data)).encode())
        await self._send({"type": "http.response.start", "status": status, "headers": (JSON, length, *headers)})
        await self._send({"type": "http.response.body", "body": data})

    async def refuse(self, error: RequestError) -> None:
        """Sends an error in the dialect's form: as events of a running stream, else with an HTTP status."""
        status = status_of(error)
        if self._head is not None:
            return await self._send_part(self.dialect.failure(self._head, error, status), more=False)
        try:
            skipped = 0
            while not self._whole and skipped < SKIPPED_BYTES:
                skipped += len(await self._part())
        except ClientGone:
            return
        retried = isinstance(error, RETRIED)
        headers = [(b"x-should-retry", b"true" if retried else b"false")]
        if retried:
            headers.append((b"retry-after", b"1"))
        await self.send_json(status, self.dialect.error(error, status), *headers)


async def _first(answer: asyncio.Future[list[PolicyReply]], gone: asyncio.Future[None], seconds: float | None) -> bool:
    """Waits for the reply. Returns False if `seconds` are over. Raises `ClientGone`."""
    await asyncio.wait((answer, gone), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    if not answer.done() and gone.done():
        raise ClientGone
    return answer.done()


def _dialect(path: str, headers: Mapping[bytes, bytes]) -> Dialect:
    """Returns the dialect of a path; for other paths, the dialect of the client."""
    if path.rstrip("/") == COUNT:
        return MESSAGES
    return DIALECTS.get(path.rstrip("/")) or (MESSAGES if b"anthropic-version" in headers else CHAT)


def _check_method(method: str, allowed: str) -> None:
    if method != allowed:
        raise WrongMethod(f"method {method}, allowed is {allowed}")


def _model(name: str) -> dict[str, Any]:
    """Returns the description of a model, readable for both OpenAI's and Anthropic's clients."""
    openai = {"object": "model", "created": 0, "owned_by": "skyrl_mega"}
    return {"id": name, **openai, "type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}


def _models() -> dict[str, Any]:
    return {"object": "list", "data": [_model(MODEL)], "has_more": False, "first_id": MODEL, "last_id": MODEL}
