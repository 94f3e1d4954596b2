"""Tool calls in what a policy wrote, as the model's own chat template has them.

A form is how a family of templates writes a call. `PARSERS` has those that are known, by name; `form_of` reads off a
template which one it uses. A call that cannot be read is no error of the run: it keeps what is wrong with it, and the
policy is told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from skyrl_mega.config.outside import Malformed, parsed
from skyrl_mega.envs.tags import every

MOST_BYTES = 2**20
"""Of one call."""


@dataclass(frozen=True)
class ToolCall:
    """One call; `error` says what is wrong with one that cannot be read."""

    id: str
    """Names it within its trajectory; the message with its result has the same."""
    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True)
class AssistantMessage:
    """A turn of the policy, read."""

    content: str
    """What it said beside its calls and after its thinking."""
    tool_calls: tuple[ToolCall, ...] = ()


Parser = Callable[[str, int], AssistantMessage]
"""(a turn's text, the number of the turn, from 1) → the message."""


def hermes(text: str, turn: int = 1) -> AssistantMessage:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes, Qwen2.5, Qwen3. What is thought is no call."""
    spoken = text.rpartition("</think>")[2].partition("<think>")[0]
    opening, closing = "<tool_call>", "</tool_call>"
    calls, content, end = [], [], 0
    for place, tag in enumerate(every(spoken, "tool_call")):
        calls.append(_call(tag.text, f"call_{turn}_{place + 1}"))
        content.append(spoken[end : tag.start])
        end = tag.start + len(opening) + len(tag.text) + len(closing)
    rest, opened, _ = spoken[end:].partition(opening)
    if opened:
        calls.append(ToolCall(f"call_{turn}_{len(calls) + 1}", error=f"the call has no {closing}"))
    return AssistantMessage("".join([*content, rest]).strip(), tuple(calls))


def _call(text: str, id: str) -> ToolCall:
    form = 'allowed is {"name": …, "arguments": {…}}'
    try:
        value = parsed(text, most=MOST_BYTES)
    except Malformed as error:
        return ToolCall(id, error=f"the call is not JSON: {error}; {form}")
    if not isinstance(value, dict):
        return ToolCall(id, error=f"the call is not a JSON object; {form}")
    name, arguments = value.get("name"), value.get("arguments", {})
    if not isinstance(name, str) or not name:
        return ToolCall(id, error=f"the call has no name; {form}")
    if not isinstance(arguments, dict):
        return ToolCall(id, name, error=f"the call's arguments are not a JSON object; {form}")
    return ToolCall(id, name, arguments)


PARSERS: Mapping[str, Parser] = {"hermes": hermes}
"""Form → its parser."""


def form_of(template: str) -> str | None:
    """The form in which a chat template has the policy write calls; None for one that is not known."""
    # Qwen3-Coder's has XML within the same tags.
    return "hermes" if "<tool_call>" in template and "<function=" not in template else None
