"""The next step of an agent: the policy sees a recorded conversation and makes the call that the record makes there."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from skyrl_mega.common.errors import UserError
from skyrl_mega.common.safe_read import Malformed, parse_json
from skyrl_mega.envs.base import BaseTextEnvStepOutput
from skyrl_mega.envs.options import Option, number
from skyrl_mega.envs.tool_calls import ToolCall
from skyrl_mega.envs.tools import Tool, ToolEnv

MOST_BYTES = 2**24
"""Maximum size of a row's tools, or of the calls in a ground truth, in bytes."""
MOST_CALLS = 16
"""Maximum number of calls in a ground truth."""
CLOSE = 1e-6
"""Largest difference of two equal numbers."""


class ToolChoiceEnv(ToolEnv):
    """A conversation of a single turn. The reward is 1 if the policy makes the calls of the ground truth, in any order
    and no others, else 0. Calls are equal if names, argument names and values are equal (`equal`); nothing is executed.
    A ground truth without calls expects a message without a call.
    """

    OPTIONS: ClassVar[Mapping[str, Option]] = {
        "similarity": number(
            0.0, "least share of common words in two equal texts of several words; 0: any two are equal", low=0, high=1
        )
    }

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] | None = None) -> None:
        super().__init__(env_config, extras)
        try:
            self.tools = _tools(self.extras)
            self.expected = _calls(self.ground_truth)
        except (Malformed, ValueError) as error:
            wrong = self.wrong_row(self.extras, self.options) or f"column reward_spec.ground_truth: {error}"
            raise UserError(f"environment tool_choice cannot use a row: {wrong}") from error

    @classmethod
    def wrong_ground_truth(cls, truth: Any) -> str | None:
        """Returns None if the truth is a JSON list of calls; else the reason."""
        try:
            _calls(truth)
        except Malformed as error:
            return f'{error}; allowed is a JSON list of {{"name": …, "arguments": {{…}}}}'
        return None

    @classmethod
    def wrong_row(cls, row: Mapping[str, Any], options: Mapping[str, Any]) -> str | None:
        """Returns the reason why a row is wrong: its tools or its ground truth cannot be read. None for a valid row."""
        try:
            _tools(row)
        except (Malformed, ValueError) as error:
            return f"column extra_info.tools: {error}"
        return super().wrong_row(row, options)

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Judges the calls of the turn, and ends the trajectory: returns reward 1 for the calls of the ground truth,
        else 0, and no messages. An expected message needs a text and no call. `metadata` has `tool_calls`, the calls of
        the turn, and `expected`, the expected calls."""
        self.turns += 1
        message = self.parse(action, self.turns)
        if self.expected:
            right = matched(self.expected, message.tool_calls, float(self.options["similarity"]))
        else:
            right = bool(message.content) and not message.tool_calls
        calls = [{"name": call.name, "arguments": call.arguments} for call in message.tool_calls]
        return BaseTextEnvStepOutput(
            observations=[], reward=float(right), done=True, metadata={"tool_calls": calls, "expected": self.expected}
        )


def matched(expected: Sequence[Mapping[str, Any]], given: Sequence[ToolCall], similarity: float) -> bool:
    """Returns True if every expected call equals a different given call, and no given call is left. `similarity` is the
    least share of common words in two equal texts (`equal`)."""
    if len(expected) != len(given):
        return False
    if not expected:
        return True
    first, rest = expected[0], expected[1:]
    return any(
        call.error is None
        and call.name == first["name"]
        and equal(first["arguments"], call.arguments, similarity)
        and matched(rest, [*given[:place], *given[place + 1 :]], similarity)
        for place, call in enumerate(given)
    )


def equal(expected: Any, given: Any, similarity: float) -> bool:
    """Returns True if two values of arguments are equal: objects with the same keys and lists of the same length if all
    values are equal; two floats up to a difference of `CLOSE`; texts of several words if the share of common words is
    at least `similarity`; other values if type and value are the same, so 1 differs from 1.0."""
    if isinstance(expected, dict) and isinstance(given, dict):
        return expected.keys() == given.keys() and all(equal(expected[key], given[key], similarity) for key in expected)
    if isinstance(expected, list) and isinstance(given, list):
        pairs = zip(expected, given, strict=False)
        return len(expected) == len(given) and all(equal(*pair, similarity) for pair in pairs)
    if isinstance(expected, str) and isinstance(given, str):
        return expected == given or _similar(expected, given, similarity)
    if isinstance(expected, float) and isinstance(given, float):
        return math.isclose(expected, given, rel_tol=0, abs_tol=CLOSE)
    return type(expected) is type(given) and bool(expected == given)


def _similar(expected: str, given: str, similarity: float) -> bool:
    """Returns True if both texts have several words, and the common words are at least the share `similarity` of the
    words of both together. Repeated words count repeatedly; capital letters do not matter."""
    a, b = Counter(expected.lower().split()), Counter(given.lower().split())
    if a.total() < 2 or b.total() < 2:
        return False
    return 2 * (a & b).total() >= similarity * (a.total() + b.total())


def _calls(truth: Any) -> list[dict[str, Any]]:
    """Returns the calls of a ground truth.

    Raises:
        Malformed: The truth is no JSON list of at most `MOST_CALLS` calls.
    """
    if not isinstance(truth, str):
        raise Malformed("not a text")
    calls = parse_json(truth, most=MOST_BYTES)
    if not isinstance(calls, list) or len(calls) > MOST_CALLS:
        raise Malformed(f"not a list of at most {MOST_CALLS} calls")
    for call in calls:
        if not (isinstance(call, dict) and call.keys() == {"name", "arguments"}):
            raise Malformed("a call has other keys than name and arguments")
        if not isinstance(call["name"], str) or not isinstance(call["arguments"], dict):
            raise Malformed("the name of a call is no text, or the arguments are no object")
    return calls


def _tools(row: Mapping[str, Any]) -> list[Tool]:
    """Returns the tools of a row, to be shown in the prompt and never executed.

    Raises:
        Malformed: `extra_info.tools` is no JSON list of functions.
        ValueError: A name or a schema is not allowed.
    """
    info = row.get("extra_info")
    text = info.get("tools") if isinstance(info, Mapping) else None
    if not isinstance(text, str):
        raise Malformed("it is missing; allowed is a JSON list of functions")
    functions = parse_json(text, most=MOST_BYTES)
    if not isinstance(functions, list) or not all(isinstance(each, dict) for each in functions):
        raise Malformed("not a list of functions")
    return [
        Tool(str(each.get("name")), each.get("parameters") or {"type": "object"}, _never, str(each.get("description")))
        for each in functions
    ]


def _never(**arguments: Any) -> str:
    raise AssertionError("the tools of a recorded conversation are not executed")
