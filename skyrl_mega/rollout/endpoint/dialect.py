"""The interface of an API's dialect, and the errors of the server beside the sessions' (`requests.py`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from skyrl_mega.rollout.endpoint.requests import (
    BadRequest,
    ChatRequest,
    ContextTooLong,
    PolicyReply,
    RequestError,
    SessionEnded,
    TokenRequest,
    TurnLimit,
)


class UnknownKey(RequestError):
    """A request without the key of a running trajectory."""


class UnknownPath(RequestError):
    """A request to an unknown path."""


class WrongMethod(RequestError):
    """A request with another HTTP method than the path's."""


class BodyTooLarge(RequestError):
    """A request with a body above the server's limit."""


class TooManyRequests(RequestError):
    """A request of a trajectory with too many requests under way."""


class PolicyFault(RequestError):
    """A failure of the run, not of the agent."""


STATUSES: Mapping[type[RequestError], int] = {
    BadRequest: 400,
    ContextTooLong: 400,
    SessionEnded: 401,
    UnknownKey: 401,
    TurnLimit: 403,
    UnknownPath: 404,
    WrongMethod: 405,
    BodyTooLarge: 413,
    TooManyRequests: 429,
    PolicyFault: 500,
}
"""Error → HTTP status. Agent programs give up at once on 401 and 403; many try again after a 400."""
RETRIED = (TooManyRequests,)
"""Temporary errors: the same request may succeed later."""


HEAD_FIELDS = (
    *("model", "stream_options", "logprobs", "top_logprobs", "return_token_ids", "thinking", "include"),
    *("instructions", "max_output_tokens", "metadata", "previous_response_id", "store", "tools", "request_id"),
    *("output_mode", "sampling_params", "token_ids"),
)
"""Fields of a request that its reply depends on; all others are dropped before the wait for the policy."""


COMMENT = ": keep-alive\n\n"
"""A comment in a stream of server-sent events; clients ignore comments."""


@dataclass(frozen=True)
class ReplyHead:
    """The parts of an HTTP reply known before the policy's reply."""

    id: str
    """Random, unique in the process."""
    created: int
    """Time of the request, in seconds since 1970."""
    body: Mapping[str, Any]
    """The fields `HEAD_FIELDS` of the request."""

    @property
    def model(self) -> str:
        """The model name of the request, repeated by the reply."""
        name = self.body.get("model")
        return name if isinstance(name, str) else "policy"


@dataclass(frozen=True)
class Dialect:
    """An API in the form of pure functions between JSON and `requests.py`."""

    read: Callable[[Mapping[str, Any]], ChatRequest | TokenRequest]
    """Reads the body of a request. Raises `BadRequest`."""
    write: Callable[[ReplyHead, list[PolicyReply]], dict[str, Any]]
    """Writes the body of a reply."""
    events: Callable[[ReplyHead, list[PolicyReply]], str]
    """Writes all further server-sent events of a reply."""
    error: Callable[[RequestError, int], dict[str, Any]]
    """Writes the body of a refusal with an HTTP status."""
    failure: Callable[[ReplyHead, RequestError, int], str]
    """Writes the last server-sent events of a failed stream."""
    opening: Callable[[ReplyHead, list[PolicyReply] | None], str] = lambda head, replies: ""
    """Writes the server-sent events in front of the reply; the reply may still be missing (None)."""
    keep_alive: str = COMMENT
    """Server-sent event, or comment, for waiting clients with a read timeout."""


def to_json(value: Any) -> str:
    """Returns a value as JSON text in one line of ASCII."""
    return json.dumps(value, separators=(",", ":"))


def event(value: Mapping[str, Any], name: str | None = None) -> str:
    """Returns a server-sent event with a JSON object as text. The event gets a name unless `name` is None."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {to_json(value)}\n\n"


def status_of(error: RequestError) -> int:
    """Returns the HTTP status of an error."""
    return next(STATUSES[kind] for kind in type(error).__mro__ if kind in STATUSES)
