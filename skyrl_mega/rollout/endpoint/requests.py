"""Requests and replies of an agent's endpoint, in a form independent of the API's dialect.

A dialect (`openai_chat`, `openai_responses`, `anthropic_messages`, `token_route`) reads JSON into these classes and
writes JSON from these classes; a session (`session.py`) answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from skyrl_mega.envs.base import Message
from skyrl_mega.envs.tool_calls import ToolCall

THOUGHT_END = "</think>"


@dataclass(frozen=True)
class ChatRequest:
    """A request for the next assistant message of a conversation."""

    messages: list[Message]
    """The whole conversation in the form of chat templates: `role` and `content`, both text; assistant messages may
    have `tool_calls` with arguments as mappings and `reasoning_content`, tool messages `tool_call_id` and `name`."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    """Offered tools in the form of chat templates (OpenAI's `{"type": "function", "function": {…}}`)."""
    max_tokens: int | None = None
    """Most tokens of the reply; None leaves the run's own limit."""
    stop: tuple[str, ...] = ()
    """Strings that end the reply; the string itself is not part of the reply."""
    n: int = 1
    """Number of independent replies."""
    ignored: tuple[str, ...] = ()
    """Names of given parameters that the run does not follow, such as `temperature`: the run's own sampling counts."""


@dataclass(frozen=True)
class TokenRequest:
    """A request to continue tokens, without a chat template."""

    tokens: Sequence[int]
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    n: ClassVar[int] = 1
    """Number of replies."""


@dataclass(frozen=True)
class PolicyReply:
    """A reply of the policy."""

    id: str
    """Unique within the session."""
    text: str
    """The whole text without the token that ends a turn, thoughts and tool calls included."""
    reasoning: str
    """The thoughts at the beginning of the text; empty without thoughts."""
    content: str
    """The text outside thoughts and tool calls."""
    tool_calls: tuple[ToolCall, ...]
    """Readable and unreadable calls (`ToolCall.error`)."""
    tokens: Sequence[int]
    """Sampled tokens of the reply, with the token that ends the turn."""
    logprobs: Sequence[float]
    """Natural log-prob of each token, under the run's sampling."""
    finish: str
    """`stop`, `length`, or `stop_string`."""
    stop_string: str | None
    """The string of `ChatRequest.stop` that ended the reply; None if none did."""
    prompt_tokens: int
    """Number of tokens that the policy read for this reply."""
    cached_tokens: int
    """How many of `prompt_tokens` came from an earlier request of the session."""

    @property
    def visible_calls(self) -> tuple[ToolCall, ...]:
        """The calls as shown to the agent: all calls, or () if a call is unreadable."""
        return () if any(call.error for call in self.tool_calls) else self.tool_calls

    @property
    def visible_text(self) -> str:
        """The text as shown to the agent: `content`, or everything behind the thoughts if a call is unreadable."""
        if not any(call.error for call in self.tool_calls):
            return self.content
        end = self.text.find(THOUGHT_END, len(self.reasoning))
        thoughts = self.reasoning or self.text.lstrip().startswith("<think>")
        return (self.text[end + len(THOUGHT_END) :] if thoughts and end >= 0 else self.text).strip()


class EndpointSession(Protocol):
    """The requests of one trajectory. The methods run in the event loop of the rollouts."""

    async def reply(self, request: ChatRequest | TokenRequest) -> list[PolicyReply]:
        """Returns `request.n` replies of the policy to a request.

        Raises:
            RequestError: The request cannot be answered; the subclass says why.
        """

    async def count(self, request: ChatRequest) -> int:
        """Returns the number of tokens that the policy would read for a chat request. Raises RequestError if
        the request cannot be answered."""


class RequestError(Exception):
    """A request that cannot be answered. The message is for the agent."""


class BadRequest(RequestError):
    """The request itself is wrong: an unknown role, messages that the chat template rejects, too many replies."""


class ContextTooLong(RequestError):
    """The context leaves no room for a reply within `rollout.max_length` or the trajectory's other token limits.

    Args:
        tokens: Number of tokens of the context.
        most: Most tokens of a sequence.
    """

    def __init__(self, tokens: int, most: int) -> None:
        super().__init__(f"the context has {tokens} tokens; a sequence has at most {most}, the reply included")
        self.tokens, self.most = tokens, most


class TurnLimit(RequestError):
    """A request beyond the last request of the trajectory (`rollout.max_turns`)."""


class SessionEnded(RequestError):
    """A request after the end of the trajectory or of its time."""
