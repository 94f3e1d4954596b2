"""Parsing of tool calls in a policy's text, in the format of the model's own chat template.

A form is the way a family of templates writes a call. `PARSERS` holds the known forms by name; `form_of` detects a
template's form. An unreadable call does not fail the run: the call stores an error that is shown to the policy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from skyrl_mega.common.safe_read import Malformed, parse_json, parse_json_at
from skyrl_mega.common.values import shown

MOST_BYTES = 2**20
"""Maximum size of a call, in bytes."""
CALL, CLOSED = "<tool_call>", "</tool_call>"
TAG = re.compile("</?(?:think|tool_call)>")
"""Opening or closing tag of a thought or a call."""


@dataclass(frozen=True)
class ToolCall:
    """A tool call; `error` describes the mistake in an unreadable call."""

    id: str
    """Identifier within the trajectory; the message with the call's result carries the same identifier."""
    name: str = ""
    """Name of the tool; may be empty if the call is unreadable."""
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    """Mistake in the call, for the policy to read; None for a readable call."""


@dataclass(frozen=True)
class AssistantMessage:
    """A parsed turn of the policy: text and tool calls."""

    content: str
    """The text outside the calls and after the thinking."""
    tool_calls: tuple[ToolCall, ...] = ()


Parser = Callable[[str, int], AssistantMessage]
"""Function (text of a turn, number of the turn from 1) → message."""


def hermes(text: str, turn: int = 1) -> AssistantMessage:
    """Parses a turn with calls as `<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes, Qwen2.5, Qwen3.

    The JSON after an opening tag is read first, so tags inside the JSON are text. Thoughts are neither call nor answer.
    An unreadable call becomes a `ToolCall` with `error`.

    Args:
        text: Text of the turn.
        turn: Number of the turn, a part of each call's `id`.
    """
    calls: list[ToolCall] = []
    content: list[str] = []
    thinking, end = False, 0  # end of the text read so far
    while tag := TAG.search(text, end):
        if not thinking:
            content.append(text[end : tag.start()])
        end = tag.end()
        if tag[0] == CALL:
            call, end = _call(text, end, f"call_{turn}_{len(calls) + 1}")
            if not thinking:
                calls.append(call)
        elif tag[0] == "<think>":
            thinking = True
        elif tag[0] == "</think>":  # the chat template may have written the opening tag
            thinking, calls, content = False, [], []
        elif not thinking:
            content.append(tag[0])
    if not thinking:
        content.append(text[end:])
    return AssistantMessage("".join(content).strip(), tuple(calls))


def _call(text: str, start: int, id: str) -> tuple[ToolCall, int]:
    """Returns the call after an opening tag, and the position after the call."""
    form = 'allowed is {"name": …, "arguments": {…}}'
    try:
        value, end = parse_json_at(text, start, most=MOST_BYTES)
        wrong = None
    except Malformed as error:
        value, end, wrong = None, start, f"the call is not JSON: {error}; {form}"
    closing = TAG.search(text, end)
    if closing is None or closing[0] != CLOSED:
        return ToolCall(id, error=f"the call has no {CLOSED}"), end
    if wrong is None and text[end : closing.start()].strip():
        wrong = f"the call is not JSON: there is more behind it; {form}"
    if wrong is not None:
        return ToolCall(id, error=wrong), closing.end()
    return _parsed_call(value, id, form), closing.end()


def _parsed_call(value: Any, id: str, form: str) -> ToolCall:
    if not isinstance(value, dict):
        return ToolCall(id, error=f"the call is not a JSON object; {form}")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return ToolCall(id, error=f"the call has no name; {form}")
    if "arguments" not in value and len(value) > 1:
        extra_keys = ", ".join(key for key in value if key != "name")
        return ToolCall(id, name, error=f"the call has {shown(extra_keys)} and no arguments; {form}")
    arguments = value.get("arguments", {})
    if not isinstance(arguments, dict):
        return ToolCall(id, name, error=f"the call's arguments are not a JSON object; {form}")
    return ToolCall(id, name, arguments)


def calls_of(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns a message's `tool_calls` in chat-template form; [] without calls. Arguments in JSON text become a
    mapping.

    Raises:
        Malformed: `tool_calls` is not a list of calls, as a list or as JSON text, or arguments are no JSON object.
    """
    calls = message.get("tool_calls") or []
    if isinstance(calls, str):
        calls = parse_json(calls, most=MOST_BYTES)
    if not isinstance(calls, list | tuple):
        raise Malformed("not a list of calls")
    read = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            raise Malformed(f'{shown(call)}: allowed is {{"function": {{"name": …, "arguments": {{…}}}}}}')
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            arguments = parse_json(arguments, most=MOST_BYTES)
        if not isinstance(arguments, Mapping):
            raise Malformed(f"the arguments of {shown(function['name'])} are not a JSON object")
        id = {"id": call["id"]} if call.get("id") else {}
        function = {"name": function["name"], "arguments": dict(arguments)}
        read.append({**id, "type": "function", "function": function})
    return read


PARSERS: Mapping[str, Parser] = {"hermes": hermes}
"""Name of a form → parser of calls in this form."""


def form_of(template: str) -> str | None:
    """Returns the form of tool calls in a chat template, a key of `PARSERS`; None for an unknown form.

    Args:
        template: Text of the template.
    """
    # Qwen3-Coder's template puts XML inside the same tags.
    return "hermes" if "<tool_call>" in template and "<function=" not in template else None
