"""Changes of a trajectory during the agent loop: tokens, messages, rewards and faults."""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from skyrl_mega.engines.base import Completion
from skyrl_mega.envs.base import Message
from skyrl_mega.envs.validate import StepOutput
from skyrl_mega.trajectories.trajectory import Kind, Status, Trajectory, TrajectoryStep

if TYPE_CHECKING:
    from skyrl_mega.rollout.endpoint.graph import AgentExchange


def append(t: Trajectory, tokens: Sequence[int], mask: int, logprobs: Sequence[float] | None = None) -> None:
    """Appends tokens to the last step of a trajectory.

    Args:
        t: The trajectory, changed in place.
        tokens: Token ids.
        mask: 1 for tokens of the policy, 0 for all others.
        logprobs: The policy's log-probs; None stores 0 for each token.
    """
    t.tokens.extend(tokens)
    t.mask.extend(array("b", [mask]) * len(tokens))
    t.logprobs.extend(array("f", [0.0]) * len(tokens) if logprobs is None else logprobs)
    t.steps[-1].end = len(t.tokens)


def begin(t: Trajectory, kind: Kind, at_s: float) -> TrajectoryStep:
    """Appends an empty step to a trajectory and returns the step. `at_s` is the step's time, as in `TrajectoryStep`.
    `kind` says who wrote the step's tokens."""
    t.steps.append(TrajectoryStep(kind, len(t.tokens), len(t.tokens), at_s=at_s))
    return t.steps[-1]


def add_response(
    t: Trajectory, answer: Completion | AgentExchange, *, at_s: float, generate_s: float
) -> TrajectoryStep:
    """Appends a step with the policy's tokens, log-probs and weight versions, and returns the step.

    Args:
        t: The trajectory, changed in place.
        answer: The policy's tokens and log-probs, the version of the weights from each index on, and the reason of the
            end.
        at_s: Time of the request, as in `TrajectoryStep`.
        generate_s: Seconds of the request.
    """
    end, step = len(t.tokens), begin(t, Kind.RESPONSE, at_s)
    step.generate_s, step.finish = generate_s, answer.finish
    t.versions += [(version, end + first) for version, first in answer.versions]
    append(t, answer.tokens, 1, answer.logprobs)
    return step


def cut(t: Trajectory, end: int) -> None:
    """Removes a trajectory's tokens from position `end` on, and the weight versions that begin there; steps stay."""
    for values in (t.tokens, t.mask, t.logprobs):
        del values[end:]
    t.versions = [(version, first) for version, first in t.versions if first < end]


def remove_end(t: Trajectory) -> None:
    """Removes the last token of a trajectory, the end token of its last response, because the same message continues.
    The trajectory's last step must be an empty observation after this response."""
    cut(t, len(t.tokens) - 1)
    t.steps[-2].end = t.steps[-1].start = t.steps[-1].end = len(t.tokens)


def append_messages(t: Trajectory, messages: list[Message]) -> None:
    """Appends messages to a trajectory's texts and counts them in the last step; adds no tokens."""
    t.messages += messages
    t.steps[-1].messages += len(messages)


def set_prompt(t: Trajectory, messages: list[Message], tokens: Sequence[int]) -> None:
    """Appends the messages and tokens of the first prompt to a new trajectory and sets `prompt_length`."""
    append(t, tokens, 0)
    append_messages(t, messages)
    t.prompt_length = len(t.tokens)


def end_message(t: Trajectory, end: int, stop_tokens: Collection[int]) -> None:
    """Appends the end token to the last response if a stop string ended it; else changes nothing.

    The published SearchR1 and SkyRL-SQL runs train on this end token, although no engine sampled the token: `mask`
    assigns the token to the policy, the last response includes the token, and the log-prob is NaN.

    Args:
        t: The trajectory, changed in place.
        end: The end token.
        stop_tokens: Tokens that end a turn.
    """
    response = next((step for step in reversed(t.steps) if step.kind is Kind.RESPONSE), None)
    if response is None or response.end != len(t.tokens) or response.finish != "stop" or t.tokens[-1] in stop_tokens:
        return
    t.tokens.append(end)
    t.mask.append(1)
    t.logprobs.append(math.nan)
    for step in t.steps[t.steps.index(response) :]:
        step.start, step.end = (step.start, len(t.tokens)) if step is response else (len(t.tokens),) * 2


def add_reward(t: Trajectory, step: TrajectoryStep, answer: StepOutput) -> None:
    """Adds the environment's reward to a response's step and to the whole trajectory, and the rewards by name to the
    trajectory. `answer.reward` contains these already, weighted."""
    step.reward = (step.reward or 0.0) + answer.reward
    t.reward += answer.reward
    for name, value in answer.rewards.items():
        t.rewards[name] = t.rewards.get(name, 0.0) + value


def last_response(t: Trajectory) -> TrajectoryStep | None:
    """Returns the latest step in which the policy produced tokens, or None."""
    return next((step for step in reversed(t.steps) if step.kind is Kind.RESPONSE and step.end > step.start), None)


def fail(t: Trajectory, status: Status, about: Mapping[str, Any]) -> None:
    """Sets a trajectory's status, sets its `reward` to 0, empties its `rewards`, and replaces the metadata by `about`,
    the error. Rewards of its steps stay."""
    t.status, t.reward, t.rewards, t.metadata = status, 0.0, {}, {**about}
