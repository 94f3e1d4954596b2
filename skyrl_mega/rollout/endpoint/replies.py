"""The policy's reply to an agent: cut at a stop string, and parsed into thoughts, text and tool calls."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from skyrl_mega.envs.tool_calls import AssistantMessage
from skyrl_mega.rollout.agent.renderer import Renderer
from skyrl_mega.rollout.endpoint.requests import THOUGHT_END

THOUGHT = "<think>"
"""Tag before the thoughts at the beginning of a reply. Some templates write the tag themselves."""


class CutReply(NamedTuple):
    """A reply up to a stop string."""

    kept: int
    """Number of tokens up to the end of the stop string; all tokens without a stop string."""
    text: str
    """The text before the stop string."""
    stop: str | None
    """The stop string; None if the reply contains none."""


def cut_at_stop(tokens: Sequence[int], stops: Sequence[str], chat: Renderer) -> CutReply:
    """Returns a reply up to the first token that completes a stop string; without a stop string, the whole reply.

    Args:
        tokens: Sampled tokens of the reply.
        stops: The agent's stop strings; empty strings do not count.
        chat: Decodes tokens.
    """

    def stopped(text: str) -> bool:
        return any(stop in text for stop in stops if stop)

    text = chat.text(tokens)
    if not stopped(text):
        return CutReply(len(tokens), text, None)
    lengths = range(1, len(tokens))
    kept = 1 + bisect_left(lengths, True, key=lambda length: stopped(chat.text(tokens[:length])))
    text = chat.text(tokens[:kept])
    place, stop = min((text.find(stop), stop) for stop in stops if stop and stop in text)
    return CutReply(kept, text[:place], stop)


class ParsedReply(NamedTuple):
    """A reply in parts."""

    reasoning: str
    """The thoughts at the beginning; empty without thoughts."""
    message: AssistantMessage
    """The text after the thoughts, and the tool calls."""


def parse_reply(text: str, chat: Renderer, turn: int, *, thinking: bool) -> ParsedReply:
    """Returns a reply's thoughts, text and tool calls. The thoughts are empty unless `thinking` is True or the reply
    begins with `<think>`. Thoughts without an end take the whole reply: text and calls are then empty.

    Args:
        text: Text of the reply.
        chat: Parses tool calls in the template's format.
        turn: Number in the identifiers of the calls, unique in the session.
        thinking: True if the template has opened the thoughts before the reply.
    """
    body = text.lstrip()
    if not (thinking or body.startswith(THOUGHT)):
        return ParsedReply("", chat.parse(text, turn))
    thoughts, closed, rest = body.removeprefix(THOUGHT).partition(THOUGHT_END)
    return ParsedReply(thoughts.strip(), chat.parse(rest, turn) if closed else AssistantMessage(""))


def thoughts_are_open(context: Sequence[int], chat: Renderer) -> bool:
    """Returns True if the template ends a context by opening the policy's thoughts. `chat` decodes the context's
    tokens."""
    return chat.text(context[-8:]).rstrip().endswith(THOUGHT)
