"""Environments with native tool calls: the chat template shows the tools to the model and defines the call format.

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
"""Maximum length of an error shown to the policy, in characters."""


class ToolError(Exception):
    """Error of a tool, shown to the policy. Any other exception is an error of the environment."""


@dataclass(frozen=True)
class Tool:
    """A function offered to the policy.

    Raises:
        ValueError: The name or the schema is not allowed.
    """

    name: str
    """Letters, digits, `_`, `.` and `-`."""
    schema: Mapping[str, Any]
    """JSON Schema of the arguments: an object, without additional properties unless the schema allows more. A call with
    additional arguments is refused, and the policy reads the error.
    """
    call: Callable[..., Any]
    """The function, called with the arguments by name. Returns text, or a JSON-serializable value."""
    description: str = ""
    """Description for the model; defaults to the first line of `call`'s docstring."""

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
        """The tool in chat-template form: `{"type": "function", "function": {"name", "description", "parameters"}}`."""
        lines = (self.description or self.call.__doc__ or "").strip().splitlines() or [""]
        described = self.description or lines[0]
        function = {"name": self.name, "description": described, "parameters": dict(self.schema)}
        return {"type": "function", "function": function}

    def argument_error(self, arguments: Mapping[str, Any]) -> str | None:
        """Returns the mistake in a call's arguments according to the tool's schema; None if the arguments are valid."""
        schema = {"additionalProperties": False, **self.schema}  # JSON Schema allows more arguments, `call` does not
        error = best_match(Draft202012Validator(schema).iter_errors(dict(arguments)))
        if error is None:
            return None
        path = ".".join(map(str, error.absolute_path))
        return f"arguments{f'.{path}' if path else ''}: {error.message}"


class ToolEnv(BaseTextEnv):
    """An environment whose policy calls tools. A subclass defines `tools` and `judge`.

    A turn with calls is answered with a `tool` message per call. A turn without calls, or the last turn allowed, is the
    answer and ends the trajectory.
    """

    tools: Sequence[Tool] = ()
    """The callable tools: an attribute of the class, or passed to `__init__` if the tools depend on the row."""
    calls_per_turn: ClassVar[int] = 8
    """Maximum number of executed calls per turn; the policy reads an error for the rest."""
    result_characters: ClassVar[int] = 10_000
    """Maximum length of a result, in characters; the rest is cut."""

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
        """Parser of a turn; the agent loop sets the parser of the model's template."""

    def judge(self, answer: str) -> float:
        """Returns the reward of the policy's answer. A subclass must override this method.

        Args:
            answer: Text of the turn that ends the trajectory, without thoughts and calls; may be empty. The turn has no
                calls, or is the last turn allowed, whose calls are not executed.

        Raises:
            NotImplementedError: The subclass does not override this method.
        """
        raise NotImplementedError(f"{type(self).__name__}.judge")

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Executes the calls of a turn and returns their results as `tool` messages, with reward 0; or judges the
        answer by `judge` and ends the trajectory.

        A turn is judged if it has no calls, and if it is the last turn: the policy could not read results. An
        unreadable call, and a ToolError of a tool, is a result for the policy; other exceptions pass through. Of more
        than `calls_per_turn` calls, only the first are executed, and the next gets an error as result; calls after it
        get no message. `metadata` has `tool_calls`, all calls of the turn.
        """
        self.turns += 1
        message = self.parse(action, self.turns)
        calls, metadata = message.tool_calls, {"tool_calls": [_shown(call) for call in message.tool_calls]}
        if not calls or self.turns >= self.max_turns:
            reward = float(self.judge(message.content))
            return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata=metadata)
        results = [self._result(call) for call in calls[: self.calls_per_turn]]
        if len(calls) > self.calls_per_turn:
            limit_error = (
                f"at most {self.calls_per_turn} calls are made in one turn; this one and those after it were not"
            )
            results.append(_message(calls[self.calls_per_turn], f"Error: {limit_error}"))
        return BaseTextEnvStepOutput(observations=results, reward=0.0, done=False, metadata=metadata)

    def _result(self, call: ToolCall) -> Message:
        """Returns the message that answers a call: the result, or an error."""
        tool = next((tool for tool in self.tools if tool.name == call.name), None)
        error = call.error
        if error is None and tool is None:
            names = ", ".join(tool.name for tool in self.tools)
            error = f"there is no tool {call.name}; allowed: {names}"
        if error is None and tool is not None:
            error = tool.argument_error(call.arguments)
        if error is not None or tool is None:
            return _message(call, f"Error: {error}"[:LONGEST_ERROR])
        try:
            result = tool.call(**call.arguments)
        except ToolError as failure:
            return _message(call, f"Error: {failure}"[:LONGEST_ERROR])
        text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
        return _message(call, text[: self.result_characters])


def definitions(env: object) -> list[dict[str, Any]]:
    """Returns the tools of an environment, or of its class, in chat-template form; [] without tools.

    Raises:
        TypeError: `tools` is not a sequence of tools.
    """
    tools = getattr(env, "tools", ()) if calls_tools(env) else ()
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Tool) for tool in tools):
        raise TypeError(f"tools is {tools!r:.100}: allowed is a list of Tool")
    return [tool.definition for tool in tools]


def calls_tools(env: object) -> bool:
    """Returns True if an environment, or an environment class, uses tool calls in the model's own template."""
    return issubclass(env if isinstance(env, type) else type(env), ToolEnv)


def _message(call: ToolCall, content: str) -> Message:
    return {"role": "tool", "content": content, "tool_call_id": call.id, "name": call.name}


def _shown(call: ToolCall) -> dict[str, Any]:
    """Returns a call for people, kept with the trajectory's step."""
    shown = {"id": call.id, "name": call.name, "arguments": call.arguments}
    return shown if call.error is None else {**shown, "error": call.error}
