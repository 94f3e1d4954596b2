"""Environments that run an agent: a program that calls the policy by itself, through an endpoint of its own.

A `BaseTextEnv` answers the policy turn by turn. An `AgentEnv` is the other way round: the run calls `run` once per
trajectory, and the agent sends requests in the form of a public API (OpenAI, Anthropic) as often as it wants. The run
records the tokens of every request and trains on exactly these tokens.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from skyrl_mega.envs.base import BaseTextEnv, BaseTextEnvStepOutput, Message

NO_PROXY = "127.0.0.1,localhost"
"""Hosts that an agent calls without a proxy: the endpoint is on loopback."""


class AgentStopped(RuntimeError):
    """An agent that ended without a result. `AgentEnv.run` raises it for failures of the agent alone.

    After a refusal by a limit of the run (requests, tokens, time) the trajectory counts as truncated, with reward 0.
    Without such a refusal it is a fault, as any other exception is, and the loss excludes the trajectory.

    Args:
        message: What happened, for people.
        metadata: Further facts for people in JSON form, kept with the trajectory.
    """

    def __init__(self, message: str, metadata: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.metadata = dict(metadata or {})


@dataclass(frozen=True)
class AgentEndpoint:
    """The address of the policy for one trajectory. It answers only during `AgentEnv.run`."""

    url: str
    """Address without a path, such as `http://127.0.0.1:8000`: Anthropic's base URL; OpenAI's is `url + "/v1"`."""
    key: str = field(repr=False)
    """API key. It belongs to this trajectory and is refused after the trajectory's end."""
    model: str
    """Model name for requests. Any other name is accepted too."""
    serve: Callable[[socket.socket], None] | None = field(default=None, compare=False, repr=False)
    """Also accepts connections on a further listening socket, from any thread, until the end of the trajectory, and
    closes the socket then. Meant for a socket in the network namespace of a sandbox, in which `url` is unreachable.
    Requests on it need the key too. None if the endpoint accepts no further socket.
    """
    seconds: float | None = field(default=None, compare=False)
    """Seconds for which requests are answered (`rollout.trajectory_timeout_s`), from the start of `AgentEnv.run`; None
    without a limit."""

    def variables(self) -> dict[str, str]:
        """Returns the environment variables by which an agent finds the endpoint: `OPENAI_BASE_URL`, `OPENAI_API_BASE`,
        `OPENAI_API_KEY`, `ANTHROPIC_BASE_URL` and `ANTHROPIC_API_KEY` for the SDKs; `MODEL_NAME`; and `NO_PROXY` and
        `no_proxy` with loopback only, in place of the user's own values."""
        return {
            "OPENAI_BASE_URL": f"{self.url}/v1",
            "OPENAI_API_BASE": f"{self.url}/v1",
            "OPENAI_API_KEY": self.key,
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": self.key,
            "MODEL_NAME": self.model,
            "NO_PROXY": NO_PROXY,
            "no_proxy": NO_PROXY,
        }


class AgentEnv(BaseTextEnv):
    """An agent for one trajectory. A subclass overrides `run`; `step` is never called."""

    @classmethod
    def longest_run_s(cls, options: Mapping[str, Any]) -> float | None:
        """Returns the longest duration of the agent in seconds under the options' own limits, without the grading,
        which may take `rollout.env_timeout_s`; None, the default, if only `rollout.trajectory_timeout_s` limits the
        agent.

        Args:
            options: Options accepted by `check_options`.
        """
        return None

    def prepare(self) -> None:
        """Prepares the agent's surroundings, such as a container, after `init` and once the agent's turn has come. The
        time limits of the agent start afterwards. May block, under `rollout.env_timeout_s`; the default does nothing.
        """

    def run(self, endpoint: AgentEndpoint, prompt: list[Message]) -> BaseTextEnvStepOutput:
        """Runs the agent to its end and grades the result. May block; runs in a thread. A subclass must override this
        method.

        Args:
            endpoint: Address and key of the policy.
            prompt: The messages returned by `init`: the task. The agent decides what the policy sees.

        Returns:
            `reward` and `metadata` of the whole trajectory; `done` True and `observations` [].

        Raises:
            AgentStopped: The agent ended without a result. Any other exception counts as a fault of the environment.
        """
        raise NotImplementedError(f"{type(self).__name__}.run")
