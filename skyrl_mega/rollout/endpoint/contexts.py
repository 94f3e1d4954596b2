"""The context of a request: the exchange that the request continues, and the tokens before the policy's reply."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skyrl_mega.common.safe_read import Malformed
from skyrl_mega.engines.base import Completion
from skyrl_mega.envs.base import ROLES, Message
from skyrl_mega.rollout.agent.renderer import Renderer, TemplateError, TooLong
from skyrl_mega.rollout.agent.routes import check_count
from skyrl_mega.rollout.endpoint.graph import AgentExchange, RequestTree
from skyrl_mega.rollout.endpoint.requests import BadRequest, ChatRequest, ContextTooLong, TokenRequest

PREFILL = "the last message is the assistant's: the policy does not continue a reply that the agent began"
LONG_TEXT = 2**15
"""Characters above which messages are rendered in a thread: a megabyte would stop all trajectories for a second."""


@dataclass(frozen=True)
class Context:
    """The tokens read by the policy before a reply."""

    parent: AgentExchange | None
    """The exchange continued by the request; None at the beginning of a conversation."""
    messages: list[Message]
    """The request's new messages."""
    tools: list[dict[str, Any]]
    between: array[int]
    """Tokens after the parent's reply; all tokens without a parent."""
    request: bytes | None
    """`graph.Continuation.digest` of the request; None for a request of tokens."""

    def tokens(self) -> array[int]:
        """Returns all tokens of the context, the parent's conversation included, int32."""
        return self.between if self.parent is None else self.parent.sequence() + self.between

    def routes_from(self) -> int:
        """Returns the index of the first token whose expert routes the exchange stores: 0 without a parent or without
        the parent's routes, else the parent's last token, because an engine returns no route for a reply's last
        token."""
        return 0 if self.parent is None or self.parent.routes is None else self.parent.length - 1

    def routes(self, completion: Completion, kept: int) -> Any:
        """Returns the expert routes of the exchange (`AgentExchange.routes`); None if the engine returned none.

        Args:
            completion: The engine's answer.
            kept: Number of tokens kept of the answer.

        Raises:
            WrongRoutes: The number of routes does not match the number of tokens.
        """
        if completion.routes is None:
            return None
        given = len(self.between) + (self.parent.length if self.parent else 0) - 1 - self.routes_from()
        check_count(completion.id, completion.routes, given + len(completion.tokens))
        return completion.routes[: given + kept]


async def of_messages(request: ChatRequest, tree: RequestTree, renderer: Renderer, *, cached: bool) -> Context:
    """Returns the context of a chat request.

    Args:
        request: The request.
        tree: The session's exchanges (request and reply), searched for the conversation that these messages continue;
            not changed.
        renderer: Tokenizer and chat template.
        cached: True to keep the tokens of a new conversation for a request with the same messages and tools.

    Raises:
        BadRequest: The policy cannot answer the messages: the chat template rejects the messages or shows no tools, a
            message is not text, or the last message is the assistant's.
        ContextTooLong: The messages surely have more tokens than a sequence may have; other lengths are not checked.
        UserError: The chat template leaves out the assistant's words.
    """
    messages, tools = request.messages, request.tools
    _check_messages(messages, tools)
    try:
        if tools and renderer.tools_refused:
            raise BadRequest(f"the request offers tools, and the policy's chat template {renderer.tools_refused}")
        parent, repeated, digest = tree.find(messages, tools)
        new = messages[repeated:]

        def render() -> array[int]:
            if parent is None:
                return array("i", renderer.render(messages, tools, cached=cached))
            return array("i", renderer.following(parent.tokens[-1], new, tools, cached=False))

        long = sum(len(message["content"]) for message in new) > LONG_TEXT
        tokens = await asyncio.to_thread(render) if long else render()
    except (Malformed, TemplateError) as error:
        raise BadRequest(str(error)) from error
    except TooLong as error:
        raise ContextTooLong(error.tokens, renderer.longest) from error
    return Context(parent, new, tools, tokens, digest)


async def of_tokens(request: TokenRequest, tree: RequestTree, renderer: Renderer) -> Context:
    """Returns the context of a request given as tokens. The length is not checked.

    Args:
        request: The request.
        tree: The session's exchanges (request and reply), searched for the longest conversation that these tokens
            continue; not changed.
        renderer: The policy's tokenizer.

    Raises:
        BadRequest: There are no tokens, or a number is outside the vocabulary.
    """
    vocabulary = renderer.vocabulary or len(renderer.tokenizer)
    if not request.tokens or not all(0 <= token < vocabulary for token in request.tokens):
        raise BadRequest(f"the prompt needs tokens, each at least 0 and below {vocabulary}")
    tokens = array("i", request.tokens)
    parent = tree.find_tokens(tokens)
    between = tokens if parent is None else tokens[parent.length :]
    text = {"role": "user", "content": renderer.text(between)}
    return Context(parent, [text] if between else [], [], between, None)


def _check_messages(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> None:
    """Raises BadRequest unless the messages are text and end with a message for the policy."""
    if not messages:
        raise BadRequest("there are no messages")
    for number, message in enumerate(messages):
        if message.get("role") not in ROLES:
            raise BadRequest(f"message {number} has role {message.get('role')!r}; allowed: {', '.join(ROLES)}")
        if not isinstance(message.get("content"), str):
            raise BadRequest(f"message {number} has no text")
    if messages[-1]["role"] == "assistant":
        raise BadRequest(PREFILL)
    try:
        json.dumps([messages, list(tools)], ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise BadRequest(f"a message is no valid Unicode: {error.reason}") from error
