"""Validation of an environment's output against the contract: user code may return anything."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from numbers import Real
from typing import Any

import numpy as np

from skyrl_mega.envs.agent import AgentEndpoint, AgentEnv
from skyrl_mega.envs.base import ROLES, BaseTextEnv, Message

KEYS = ("observations", "messages", "reward", "rewards_at", "done", "metadata")
"""Allowed keys of a step's output."""
EXTRA_KEYS = {"tool": ("tool_call_id", "name"), "assistant": ("tool_calls",)}
"""Role → keys of a message besides role and content."""


class BadOutput(Exception):
    """An environment's output breaks the contract. The message gives method, key, value and the allowed values."""


@dataclass(frozen=True)
class StepOutput:
    """A validated `BaseTextEnvStepOutput`: every field is of the declared type."""

    observations: list[Message]
    """Messages for the policy's next turn."""
    messages: list[Message] | None
    """The whole conversation, rewritten; None if the conversation continues."""
    reward: float
    """Finite; the weighted sum of named rewards, plus the rewards of parts."""
    done: bool
    """True if the trajectory ends."""
    metadata: dict[str, Any]
    """Metadata after a round trip through JSON: lists for tuples, text for types unknown to JSON."""
    rewards: dict[str, float]
    """Rewards by name, before weighting; empty for a single unnamed reward."""
    _: KW_ONLY
    rewards_at: list[tuple[int, float]]
    """(end, reward) of parts of the answer, each up to character `end`."""

    @property
    def tool_calls(self) -> list[Any]:
        """The policy's calls in this step, `metadata["tool_calls"]`; [] if the environment lists none."""
        calls: list[Any] = self.metadata.get("tool_calls") or []
        return calls


def init(env: BaseTextEnv, prompt: list[Message]) -> list[Message]:
    """Calls the environment's `init` with the row's prompt, and returns the validated first messages of the
    conversation, at least one.

    Raises:
        BadOutput: The output breaks the contract.
        Exception: The environment raised it.
    """
    output = env.init(prompt)
    if not isinstance(output, tuple) or len(output) != 2:
        raise BadOutput(f"init gave {_shown(output)}; allowed: (messages, info)")
    messages = check_messages("init: messages", output[0])
    if not messages:
        raise BadOutput("init: messages is empty; allowed: at least one message")
    return messages


def step(env: BaseTextEnv, action: str, weights: Mapping[str, float] | None = None) -> StepOutput:
    """Calls the environment's `step` and returns the validated output. Invalid Unicode in `action` becomes `?`.

    Args:
        env: The environment.
        action: The policy's text.
        weights: `algorithm.reward_weights`: reward name → factor in the sum of named rewards. None weighs all as 1.

    Raises:
        BadOutput: The output breaks the contract, or a named reward has no weight.
        Exception: The environment raised it.
    """
    return _output("step", env.step(action.encode(errors="replace").decode()), len(action), weights)


def out_of_time(env: BaseTextEnv, weights: Mapping[str, float] | None = None) -> StepOutput | None:
    """Calls the environment's `out_of_time` to judge the work so far, after the time limit has expired between turns.

    Args:
        env: The environment.
        weights: `algorithm.reward_weights`: reward name → factor in the sum of named rewards. None weighs all as 1.

    Returns:
        The validated output; None if the environment gives no judgement, so that the rewards given so far stand.

    Raises:
        BadOutput: The output breaks the contract, or a named reward has no weight.
        Exception: The environment raised it.
    """
    judge = getattr(env, "out_of_time", None)  # a class without BaseTextEnv as a base may lack the method
    output = judge() if callable(judge) else None
    return None if output is None else _output("out_of_time", output, 0, weights)


def run(
    env: AgentEnv, endpoint: AgentEndpoint, prompt: list[Message], weights: Mapping[str, float] | None = None
) -> StepOutput:
    """Calls the `run` of an agent's environment and returns the validated output.

    Args:
        env: The environment.
        endpoint: Address and key of the policy.
        prompt: The messages returned by `init`.
        weights: `algorithm.reward_weights`: reward name → factor in the sum of named rewards. None weighs all as 1.

    Raises:
        BadOutput: The output breaks the contract, or a named reward has no weight.
        Exception: The environment raised it, such as AgentStopped.
    """
    output = _output("run", env.run(endpoint, prompt), 0, weights)
    if output.observations or output.messages is not None:
        raise BadOutput("run: the agent has ended and sees no further messages; allowed: observations = []")
    return output


def _output(method: str, output: Any, characters: int, weights: Mapping[str, float] | None) -> StepOutput:
    """Validates a method's output for an answer of `characters` characters."""
    if not isinstance(output, Mapping):
        raise BadOutput(f"{method} gave {_shown(output)}; allowed: a dict with {', '.join(KEYS)}")
    for key in ("observations", "reward", "done"):
        if key not in output:
            raise BadOutput(f"{method}: {key} is missing; the keys are {_shown(sorted(map(str, output)))}")
    for key, value in output.items():
        if key not in KEYS and value is not None:
            raise BadOutput(f"{method}: {key} = {_shown(value)}: there is no such key; allowed: {', '.join(KEYS)}")
    reward: Any = output["reward"]
    done, metadata = output["done"], output.get("metadata")
    rewards = _named(method, reward, weights or {}) if isinstance(reward, Mapping) else {}
    if rewards:
        reward = math.fsum((weights or {}).get(name, 1.0) * value for name, value in rewards.items())
    if not _finite(reward):
        allowed = "a finite number, or a dict of names and numbers"
        raise BadOutput(f"{method}: reward = {_shown(reward)}; allowed: {allowed}")
    rewards_at = _of_parts(method, output.get("rewards_at"), characters)
    reward = sum((part for _, part in rewards_at), reward)
    if not _finite(reward):
        raise BadOutput(f"{method}: reward and rewards_at sum to {_shown(reward)}; allowed: a finite number")
    if not isinstance(done, bool | np.bool_):
        raise BadOutput(f"{method}: done = {_shown(done)}; allowed: True or False")
    observations = check_messages(f"{method}: observations", output["observations"])
    messages = output.get("messages")
    if messages is not None:
        messages = check_messages(f"{method}: messages", messages)
        if observations or not messages:
            raise BadOutput(
                f"{method}: messages is the whole conversation, rewritten: allowed is at least one, and observations = "
                "[]"
            )
    return StepOutput(
        observations, messages, float(reward), bool(done), _metadata(method, metadata), rewards, rewards_at=rewards_at
    )


def _finite(value: Any) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


def _named(method: str, rewards: Mapping[Any, Any], weights: Mapping[str, float]) -> dict[str, float]:
    """Validates rewards by name."""
    for name, value in rewards.items():
        if not isinstance(name, str) or not name or not _finite(value):
            raise BadOutput(f"{method}: reward[{name!r}] = {_shown(value)}; allowed: a finite number under a text")
        if weights and name not in weights:
            raise BadOutput(
                f"{method}: reward[{name!r}] has no weight; algorithm.reward_weights has "
                f"{', '.join(map(repr, weights))}"
            )
    return {name: float(value) for name, value in rewards.items()}


def _of_parts(method: str, rewards_at: Any, characters: int) -> list[tuple[int, float]]:
    """Validates rewards of parts of an answer of `characters` characters."""
    if rewards_at is None:
        return []
    if not isinstance(rewards_at, list | tuple):
        raise BadOutput(f"{method}: rewards_at = {_shown(rewards_at)}; allowed: a list of (end, reward)")
    for i, part in enumerate(rewards_at):
        pair = isinstance(part, list | tuple) and len(part) == 2 and not any(isinstance(value, bool) for value in part)
        is_position = pair and isinstance(part[0], int | np.integer) and 1 <= part[0] <= characters
        if not is_position or not _finite(part[1]):
            raise BadOutput(
                f"{method}: rewards_at[{i}] = {_shown(part)}; allowed: (end, reward), a number of characters from 1 to "
                f"the action's {characters}, and a finite number"
            )
    return [(int(end), float(reward)) for end, reward in rewards_at]


def check_messages(key: str, messages: Any) -> list[Message]:
    """Returns messages in JSON form, without optional keys that are None.

    Args:
        key: Method and name, for errors.
        messages: The value to check, of any type.

    Raises:
        BadOutput: `messages` is no list of messages: a wrong role, key or type, or text that is no valid Unicode.
    """
    if not isinstance(messages, list | tuple):
        raise BadOutput(f"{key} = {_shown(messages)}; allowed: a list of messages")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            raise BadOutput(f"{key}[{i}] = {_shown(message)}; allowed: a dict with role and content")
        role, content = message["role"], message["content"]
        if not isinstance(role, str) or role not in ROLES:
            raise BadOutput(f"{key}[{i}].role = {_shown(role)}; allowed: {', '.join(ROLES)}")
        if not isinstance(content, str):
            raise BadOutput(f"{key}[{i}].content = {_shown(content)}; allowed: text")
        try:
            content.encode()
        except UnicodeEncodeError as error:
            raise BadOutput(f"{key}[{i}].content is no valid Unicode: {error.reason} at {error.start}") from error
        for name in set(message) - {"role", "content"}:
            if name not in EXTRA_KEYS.get(role, ()):
                allowed = ", ".join(("role", "content", *EXTRA_KEYS.get(role, ())))
                raise BadOutput(f"{key}[{i}] = {_shown(message)}: {name}; allowed: a dict with {allowed}")
    return [_plain(f"{key}[{i}]", message) for i, message in enumerate(messages)]


def _plain(key: str, message: Mapping[str, Any]) -> Message:
    """Returns a message in JSON form."""
    plain: Message = {"role": str(message["role"]), "content": str(message["content"])}
    for name in EXTRA_KEYS.get(plain["role"], ()):
        if (value := message.get(name)) is None:
            continue
        if name == "tool_calls" and not (isinstance(value, list) and all(map(_is_call, value))):
            raise BadOutput(
                f'{key}.tool_calls = {_shown(value)}; allowed: a list of {{"id", "function": {{"name", "arguments"}}}}'
            )
        if name != "tool_calls" and not isinstance(value, str):
            raise BadOutput(f"{key}.{name} = {_shown(value)}; allowed: text")
        plain[name] = _json(f"{key}.{name}", value)
    return plain


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str) and "arguments" in function


def _json(key: str, value: Any) -> Any:
    try:
        text = json.dumps(value, ensure_ascii=False)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise BadOutput(f"{key} cannot be written as JSON: {error!r}") from error
    return json.loads(text)


def _metadata(method: str, metadata: Any) -> dict[str, Any]:
    if metadata is None:
        return {}
    if not isinstance(metadata, Mapping):
        raise BadOutput(f"{method}: metadata = {_shown(metadata)}; allowed: a dict")
    if not isinstance(metadata.get("tool_calls") or [], list):
        raise BadOutput(f"{method}: metadata.tool_calls = {_shown(metadata['tool_calls'])}; allowed: a list")
    try:
        text = json.dumps(dict(metadata), default=str, ensure_ascii=False)
        text.encode()
    except Exception as error:  # keys of other types, cycles, a failing __str__
        raise BadOutput(f"{method}: metadata cannot be written as JSON: {error!r}") from error
    plain: dict[str, Any] = json.loads(text)
    return plain


def _shown(value: Any) -> str:
    """Returns a value's type and the start of its repr."""
    text = f"{type(value).__name__} {value!r}"
    return text if len(text) <= 200 else text[:200] + "…"
