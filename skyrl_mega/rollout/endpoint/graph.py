"""The tree of a session's exchanges. A request continues the exchange with the longest conversation repeated by the
request. So an agent opens a branch by rewriting, compacting or forking the history.

Conversations are compared by content: roles, texts and tool calls. Identifiers of calls, the spelling of numbers, and
spaces around the policy's text do not matter. Thoughts sent back only choose among conversations of the same content.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from skyrl_mega.envs.base import Message
from skyrl_mega.envs.tool_calls import calls_of

if TYPE_CHECKING:
    import numpy as np


SIZE = 16
"""Bytes of a digest."""


@dataclass(eq=False)
class AgentExchange:
    """A request and the policy's reply: a node of the tree."""

    parent: AgentExchange | None
    """The exchange continued by the request; None at the beginning of a conversation."""
    messages: list[Message]
    """The request's messages after the parent's conversation; for people."""
    between: array[int]
    """Tokens between the parent's reply and this reply: the template's text and the new messages. At the beginning of a
    conversation all tokens of the context."""
    tokens: array[int]
    """Tokens of the reply, int32, exactly as sampled."""
    logprobs: array[float]
    """Log-prob of each token of the reply, float32."""
    versions: Sequence[tuple[int, int]]
    """Pairs (weight version, index of the version's first token in `tokens`)."""
    reply: Message
    """The reply as an assistant message with the whole text; for people."""
    finish: str
    """Reason for the end of the reply: `stop` or `length`."""
    routes: np.ndarray | None = None
    """Expert routes of the tokens from the parent's last token to this reply's last token but one, [n, M, K]; None
    from an engine without routes."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    """Tools offered in the request."""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    """Tool calls of the reply, with `name` and `arguments`; for people."""
    at_s: float = 0.0
    """Seconds from the trajectory's opening to the request."""
    generate_s: float = 0.0
    """Seconds from the request to the reply."""
    length: int = field(init=False)
    """Number of tokens of the conversation, the reply included."""
    opening: int = field(init=False)
    """Number of tokens of the conversation's first context, before any reply."""
    continued: bool = field(init=False, default=False)
    """True if another exchange continues this exchange."""

    def __post_init__(self) -> None:
        """Sets the lengths, and marks the parent as continued."""
        self.length = len(self.between) + len(self.tokens)
        self.opening = len(self.between)
        if self.parent is not None:
            self.length += self.parent.length
            self.opening = self.parent.opening
            self.parent.continued = True

    def path(self) -> list[AgentExchange]:
        """Returns the exchanges of the conversation, from the first to this exchange."""
        path = [self]
        while (parent := path[-1].parent) is not None:
            path.append(parent)
        return path[::-1]

    def sequence(self) -> array[int]:
        """Returns the tokens of the conversation, the reply included; a new array, int32."""
        tokens = array("i")
        for exchange in self.path():
            tokens.extend(exchange.between)
            tokens.extend(exchange.tokens)
        return tokens


class Continuation(NamedTuple):
    """The place of a request in the tree."""

    exchange: AgentExchange | None
    """The exchange to continue; None if the request begins a conversation."""
    repeated: int
    """Number of the request's messages in the exchange's conversation."""
    digest: bytes
    """Digests of all messages and tools of the request, without and with thoughts, for `RequestTree.add`."""


class RequestTree:
    """The exchanges of a session."""

    def __init__(self) -> None:
        self.exchanges: list[AgentExchange] = []
        """All exchanges, in the order of the replies."""
        self._by_conversation: dict[bytes, AgentExchange] = {}
        """Digest of tools, messages and reply, without or with thoughts → the latest such exchange."""

    def find(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Continuation:
        """Returns the place of a request: after the exchange with the same tools and the longest conversation among the
        proper prefixes of the request's messages. Of several exchanges the latest with the request's thoughts is taken,
        or else the latest. Without such an exchange, the request begins a conversation.

        Raises:
            Malformed: The `tool_calls` of an assistant message are no list of calls.
        """
        latest, repeated = None, 0
        digest = b"".join(_digest(kind, _json(list(tools))) for kind in (b"content", b"thoughts"))
        for number, message in enumerate(messages, 1):
            digest = _extend(digest, message)
            content, thoughts = digest[:SIZE], digest[SIZE:]
            exchange = self._by_conversation.get(thoughts) or self._by_conversation.get(content)
            if exchange is not None and number < len(messages):
                latest, repeated = exchange, number
        return Continuation(latest, repeated, digest)

    def find_tokens(self, tokens: array[int]) -> AgentExchange | None:
        """Returns the exchange with the longest conversation among the prefixes of the tokens, the latest of several;
        None without such an exchange."""
        longest: AgentExchange | None = None
        for exchange in reversed(self.exchanges):
            least = 0 if longest is None else longest.length
            if least < exchange.length <= len(tokens) and exchange.sequence() == tokens[: exchange.length]:
                longest = exchange
        return longest

    def add(self, exchange: AgentExchange, request: bytes | None, shown: Message) -> None:
        """Adds an exchange, for later requests to continue.

        Args:
            exchange: The exchange.
            request: `Continuation.digest` of the request; None for a request of tokens, never continued by messages.
            shown: The reply as an assistant message, as the agent sees and will repeat it.

        Raises:
            Malformed: The `tool_calls` of `shown` are no list of calls.
        """
        self.exchanges.append(exchange)
        if request is not None:
            digest = _extend(request, shown)
            self._by_conversation[digest[:SIZE]] = self._by_conversation[digest[SIZE:]] = exchange

    def conversations(self) -> list[AgentExchange]:
        """Returns the last exchange of each conversation, in the order of the replies."""
        return [exchange for exchange in self.exchanges if not exchange.continued]


def _content(message: Message) -> str:
    """Returns the part of a message used for comparing conversations."""
    text = message.get("content") or ""
    if message["role"] != "assistant":
        return _json([message["role"], text])
    functions = [call["function"] for call in calls_of(message)]
    calls = [[call["name"], _plain_numbers(call["arguments"])] for call in functions]
    return _json(["assistant", text.strip(), calls])


def _plain_numbers(value: Any) -> Any:
    """Returns a JSON value with every number as a float: JavaScript writes 1.0 as 1, and rounds whole numbers above
    2^53."""
    if isinstance(value, Mapping):
        return {name: _plain_numbers(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_numbers(inner) for inner in value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value) + 0.0  # -0.0 becomes 0.0
    return value


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _extend(digest: bytes, message: Message) -> bytes:
    """Returns `Continuation.digest` after a further message."""
    content = _content(message)
    thoughts = (message.get("reasoning_content") or "").strip()
    return _digest(digest[:SIZE], content) + _digest(digest[SIZE:], _json([content, thoughts]))


def _digest(before: bytes, text: str) -> bytes:
    return hashlib.blake2b(before + text.encode(), digest_size=SIZE).digest()
