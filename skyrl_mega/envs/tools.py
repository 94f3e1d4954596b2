"""Environments with native tool calls: the model is shown the tools and calls them as its chat template says.

class Weather(ToolEnv):
    tools = (Tool("temperature", {"type": "object", "properties": {"city": {"type": "string"}}}, look_up),)

    def judge(self, answer):
        return float(self.ground_truth in answer)
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, best_match

from skyrl_mega.envs.base import BaseTextEnv, BaseTextEnvStepOutput, Message
from skyrl_mega.envs.tool_calls import Parser, ToolCall, hermes

LONGEST_ERROR = 300
"""Characters of an error that the policy is told."""


class ToolError(Exception):
    """Raised by a tool: the policy reads its text. Any other exception is an error of the environment."""


@dataclass(frozen=True)
class Tool:
    """Something that the policy may call.

    Raises:
        ValueError: A name or a schema that is not allowed.
    """

    name: str
    """Letters, digits, `_`, `.` and `-`."""
    schema: Mapping[str, Any]
    """JSON Schema of the arguments: an object, without other properties where it does not say that they may be. A call
    with others is refused, and the policy is told."""
    call: Callable[..., Any]
    """Gets the arguments by name. Gives text, or what JSON can say."""
    description: str = ""
    """What the model reads about it; the first line of `call`'s docstring where there is none."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w.-]{1,64}", self.name):
            raise ValueError(f"tool {self.name!r}: allowed is a name of at most 64 letters, digits, _, . and -")
        if self.schema.get("type") != "object":
            raise ValueError(f'tool {self.name}: schema: allowed is a JSON Schema with "type": "object"')
        try:
            Draft202012Validator.check_schema(dict(self.schema))
        except SchemaError as error:
            raise ValueError(f"tool {self.name}: schema: {error.message}") from error

    @cached_property
    def definition(self) -> dict[str, Any]:
        """As chat templates take it."""
        lines = (self.description or self.call.__doc__ or "").strip().splitlines() or [""]
        described = self.description or lines[0]
        function = {"name": self.name, "description": described, "parameters": dict(self.schema)}
        return {"type": "function", "function": function}

    def wrong(self, arguments: Mapping[str, Any]) -> str | None:
        """What is wrong with a call's arguments; None where nothing is."""
        schema = {"additionalProperties": False, **self.schema}  # JSON Schema lets others pass, `call` does not
        error = best_match(Draft202012Validator(schema).iter_errors(dict(arguments)))
        if error is None:
            return None
        place = ".".join(map(str, error.absolute_path))
        return f"arguments{f'.{place}' if place else ''}: {error.message}"


class ToolEnv(BaseTextEnv):
    """An environment whose policy calls tools. A subclass gives `tools` and `judge`.

    A turn with calls is answered with a message of role `tool` for each; a turn without calls is the answer, which
    ends the trajectory.
    """

    tools: Sequence[Tool] = ()
    """What may be called: of the class, or given to `__init__` where tools need the row."""
    calls_per_turn: ClassVar[int] = 8
    """Calls of one turn that are made; the policy is told that the others are not."""
    result_characters: ClassVar[int] = 10_000
    """Of one result; what follows is left out."""

    def __init__(
        self,
        env_config: Mapping[str, Any] | None = None,
        extras: Mapping[str, Any] | None = None,
        tools: Sequence[Tool] | None = None,
    ) -> None:
        super().__init__(env_config, extras)
        if tools is not None:
            self.tools = tools
        self.parse: Parser = hermes
        """Reads a turn; the agent loop gives the one of the model's template."""

    def judge(self, answer: str) -> float:
        """The reward of the policy's answer: the text of a turn without calls."""
        raise NotImplementedError(f"{type(self).__name__}.judge")

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Makes the calls, or judges the answer. In the last turn nothing is called: the policy would not read it."""
        self.turns += 1
        message = self.parse(action, self.turns)
        calls, metadata = message.tool_calls, {"tool_calls": [_shown(call) for call in message.tool_calls]}
        if not calls or self.turns >= self.max_turns:
            reward = float(self.judge(message.content))
            return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata=metadata)
        results = [self._result(call) for call in calls[: self.calls_per_turn]]
        if len(calls) > self.calls_per_turn:
            said = f"at most {self.calls_per_turn} calls are made in one turn; this one and those after it were not"
            results.append(_message(calls[self.calls_per_turn], f"Error: {said}"))
        return BaseTextEnvStepOutput(observations=results, reward=0.0, done=False, metadata=metadata)

    def _result(self, call: ToolCall) -> Message:
        """The answer to one call: its result, or what is wrong with it."""
        tool = next((tool for tool in self.tools if tool.name == call.name), None)
        error = call.error
        if error is None and tool is None:
            known = ", ".join(tool.name for tool in self.tools)
            error = f"there is no tool {call.name}; allowed: {known}"
        if error is None and tool is not None:
            error = tool.wrong(call.arguments)
        if error is not None or tool is None:
            return _message(call, f"Error: {error}"[:LONGEST_ERROR])
        try:
            result = tool.call(**call.arguments)
        except ToolError as told:
            return _message(call, f"Error: {told}"[:LONGEST_ERROR])
        text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
        return _message(call, text[: self.result_characters])


def definitions(env: object) -> list[dict[str, Any]]:
    """The tools of an environment, or of its class, as chat templates take them; [] where it has none.

    Raises:
        TypeError: `tools` is no sequence of tools.
    """
    tools = getattr(env, "tools", ()) if calls_tools(env) else ()
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Tool) for tool in tools):
        raise TypeError(f"tools is {tools!r:.100}: allowed is a list of Tool")
    return [tool.definition for tool in tools]


def calls_tools(env: object) -> bool:
    """Whether an environment, or a class of them, has tools that are called in the model's own template."""
    return issubclass(env if isinstance(env, type) else type(env), ToolEnv)


def _message(call: ToolCall, content: str) -> Message:
    return {"role": "tool", "content": content, "tool_call_id": call.id, "name": call.name}


def _shown(call: ToolCall) -> dict[str, Any]:
    """For people: kept with the trajectory's step."""
    shown = {"id": call.id, "name": call.name, "arguments": call.arguments}
    return shown if call.error is None else {**shown, "error": call.error}
