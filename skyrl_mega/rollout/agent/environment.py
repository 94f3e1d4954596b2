"""The environment of a trajectory, which may block, raise an exception, or never return."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from skyrl_mega.cluster import channel
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import EnvironmentConfig
from skyrl_mega.envs import blame, registry, validate
from skyrl_mega.envs.agent import AgentEndpoint, AgentEnv, AgentStopped
from skyrl_mega.envs.base import BaseTextEnv, Message
from skyrl_mega.envs.faults import InfrastructureFault
from skyrl_mega.envs.tools import calls_tools, definitions
from skyrl_mega.rollout.agent.env_pool import Abandoned, Call, EnvPool, Raised
from skyrl_mega.rollout.agent.renderer import Renderer
from skyrl_mega.telemetry.trace import Span, wall_clock
from skyrl_mega.trajectories.trajectory import Status, Trajectory

LONGEST_ERROR = 2000
"""Most characters kept of an environment's error."""


class EnvironmentFault(Exception):
    """An environment raised an exception, exceeded the time limit or broke the contract. Only the trajectory of this
    environment ends.

    Args:
        status: Status of the trajectory.
        text: The error.
        at: Line in the environment's own file; None if unknown.
    """

    def __init__(self, status: Status, text: str, at: str | None = None) -> None:
        self.status, self.at = status, at
        super().__init__(text)

    @property
    def about(self) -> dict[str, str]:
        """The trajectory's metadata of this fault: `error`, the text; and `at`, the line in the environment's own file,
        left out if unknown."""
        return {"error": str(self)} | ({"at": self.at} if self.at else {})


class Environment:
    """The environment of a trajectory. Each call runs in a thread, unless the class declares that no method blocks. If
    the caller stops waiting for a call, the thread closes the environment when the call returns.

    The methods raise EnvironmentFault if the environment's code raises an exception, exceeds the time limit or breaks
    the contract.

    Args:
        t: The trajectory; the duration of each call is added to the last step.
        settings: Environment classes of the run.
        threads: Runs the calls, so that a blocking environment delays no other trajectory.
        limit_s: Time limit of a call (`rollout.env_timeout_s`).
        spans: Receives a record of each call; None records nothing.
        classes: The resolved classes by name, shared by the environments of an agent.
    """

    def __init__(
        self,
        t: Trajectory,
        settings: EnvironmentConfig,
        threads: EnvPool,
        limit_s: float,
        spans: Callable[[], list[Span] | None],
        classes: dict[str, type[BaseTextEnv]],
    ) -> None:
        self.t, self.settings, self.threads, self.limit_s, self.spans = t, settings, threads, limit_s, spans
        self.classes = classes
        self._inline = False
        """True if calls run in the event loop's thread."""
        self.tools: list[dict[str, Any]] = []
        """Tools offered to the policy, in the format of the template; known once the environment is open."""
        self._made: list[Any] = []
        """The environment itself; empty before `open` and after `close`."""
        self._left = False
        """True once a thread of an abandoned call closes the environment."""

    @property
    def is_open(self) -> bool:
        """True from the creation of the environment until `close`; False once the thread of an abandoned call closes
        the environment."""
        return bool(self._made) and not self._left

    async def open(self, turns: int, chat: Renderer) -> list[Message]:
        """Creates the environment, sets `tools`, and returns the conversation's first messages. `close` must follow,
        also after a fault.

        Args:
            turns: Most turns of the trajectory.
            chat: Parses the policy's tool calls.

        Raises:
            EnvironmentFault: The environment is unknown, raised an exception, exceeded the time limit, or returned
                invalid messages.
        """

        prompt = self.t.prompt
        cls = self._resolve(prompt.env_class)
        self._inline = registry.runs_inline(cls)

        def make() -> list[Message]:
            env: Any = registry.create(cls, prompt.env_class, prompt.extras, self.settings, turns)
            self._made.append(env)  # before `init`, which may fail, for `close`
            if calls_tools(env):
                env.parse = chat.parse
            messages = validate.init(env, list(prompt.messages))
            self.tools = definitions(env)
            return messages

        return await self._call("init", make)

    def _resolve(self, name: str) -> type[BaseTextEnv]:
        """Returns the class of a name. Start-up has imported the classes of all rows, so this does not block."""
        if name not in self.classes:
            try:
                self.classes[name] = registry.resolve(name, self.settings)
            except UserError as error:
                raise self.fault(Status.ERROR_ENV, f"init raised {_safe_repr(error)}", error) from error
        return self.classes[name]

    async def step(self, answer: str, reward_weights: Mapping[str, float]) -> validate.StepOutput:
        """Calls the environment with the text of a turn of the policy and returns the validated answer. The environment
        must be open.

        Args:
            answer: Text of the policy's turn.
            reward_weights: `algorithm.reward_weights`.

        Raises:
            EnvironmentFault: The environment raised an exception, exceeded the time limit, or answered with something
                invalid.
        """
        return await self._call("step", validate.step, self._made[0], answer, reward_weights)

    @property
    def is_agent(self) -> bool:
        """True if the open environment runs an agent."""
        return bool(self._made) and isinstance(self._made[0], AgentEnv)

    async def prepare(self) -> None:
        """Calls the method `prepare` of an agent's environment; does nothing if the class does not define one. The
        environment must be open.

        Raises:
            EnvironmentFault: The environment raised an exception or exceeded the time limit of a call.
        """
        env = self._made[0]
        if type(env).prepare is not AgentEnv.prepare:
            await self._call("prepare", env.prepare, agent_limit_s=self.limit_s)

    async def run(
        self,
        endpoint: AgentEndpoint,
        prompt: list[Message],
        reward_weights: Mapping[str, float],
        trajectory_timeout_s: float | None,
    ) -> validate.StepOutput:
        """Runs the environment's agent to its end and returns the validated result.

        Args:
            endpoint: Address and key of the policy.
            prompt: The messages returned by `open`.
            reward_weights: `algorithm.reward_weights`.
            trajectory_timeout_s: `rollout.trajectory_timeout_s`, None without a limit; afterwards the agent has the
                time limit of a call left to grade its work. The environment's own `longest_run_s` counts in the same
                way.

        Raises:
            EnvironmentFault: The agent raised an exception, exceeded the time limit, or returned something invalid; or
                `run` has no time limit.
        """
        env = self._made[0]
        limits = [s for s in (trajectory_timeout_s, type(env).longest_run_s(env.options)) if s is not None]
        if not limits:
            raise self.fault(Status.ERROR_ENV, "run has no time limit; set rollout.trajectory_timeout_s")
        limit_s = min(limits) + self.limit_s
        return await self._call("run", validate.run, env, endpoint, prompt, reward_weights, agent_limit_s=limit_s)

    async def out_of_time(self, reward_weights: Mapping[str, float]) -> validate.StepOutput | None:
        """Asks the environment to grade a trajectory after the time limit. Returns None without such a method in the
        environment, or without a grade. The environment must be open. `reward_weights` are `algorithm.reward_weights`.

        Raises:
            EnvironmentFault: The environment raised an exception, exceeded the time limit, or answered with something
                invalid.
        """
        return await self._call("out_of_time", validate.out_of_time, self._made[0], reward_weights)

    async def close(self) -> None:
        """Closes the environment, unless it was never opened, is closed, or a late thread closes it. Bounded by
        `limit_s`, like every call. An error is not raised but stored in the metadata as `close_error`: the trajectory
        itself is complete."""
        if not self.is_open:
            return
        env = self._made.pop()
        if not registry.needs_close(env):
            return
        try:
            await self._call("close", env.close)
        except EnvironmentFault as fault:
            self.t.metadata["close_error"] = f"{fault} (at {fault.at})" if fault.at else str(fault)

    def fault(self, status: Status, text: str, error: BaseException | None = None) -> EnvironmentFault:
        """Returns, without raising, a fault with the status, the text and the environment's name, and with the line in
        the environment's own file at which `error` was raised, if known; no line of an agent that stopped."""
        text = text.encode(errors="backslashreplace").decode()[:LONGEST_ERROR]
        name = self.t.prompt.env_class
        at = None if isinstance(error, AgentStopped) else blame.fault_location(error, name, self.settings)
        return EnvironmentFault(status, f"environment {name}: {text}", at)

    async def _call(
        self, what: str, function: Callable[..., Any], *args: Any, agent_limit_s: float | None = None
    ) -> Any:
        """Calls a method of the environment in a thread.

        Args:
            what: Name of the method, for errors.
            function: The call.
            args: Arguments of `function`.
            agent_limit_s: Time limit of a call that waits for no slot of other calls, as an agent takes as long as a
                whole trajectory; None for all other calls.
        """
        name = self.t.prompt.env_class
        call = Call(function, *args, late=lambda: [env.close() for env in self._made])
        try:
            with channel.running_environment(name):
                if agent_limit_s is not None:
                    return await self.threads.run_agent(call, agent_limit_s)
                return await self.threads.run(call, self.limit_s, inline=self._inline)
        except Abandoned:
            limit = f"rollout.env_timeout_s={self.limit_s:g}"
            if agent_limit_s is not None and agent_limit_s > self.limit_s:
                limit = f"{agent_limit_s:g} s, its own limit or rollout.trajectory_timeout_s, plus {limit}"
            raise self.fault(Status.ERROR_ENV_TIMEOUT, f"{what} took longer than {limit}") from None
        except Raised as raised:
            error = raised.error
            plain = isinstance(error, validate.BadOutput | AgentStopped)
            text = str(error) if plain else f"{what} raised {_safe_repr(error)}"
            infrastructure = isinstance(error, InfrastructureFault)
            status = Status.ERROR_INFRASTRUCTURE if infrastructure else Status.ERROR_ENV
            raise self.fault(status, text, error) from error
        finally:
            self._left |= call.given_up
            seconds = call.seconds()
            self.t.seconds["env"] += seconds
            self.t.steps[-1].env_s += seconds
            if (spans := self.spans()) is not None and call.start is not None:
                about = {"environment": name, "prompt": self.t.prompt.uid, "sample": self.t.sample}
                start = wall_clock(call.start)
                spans.append(Span(f"{what} {name}", start, start + seconds, about))


def _safe_repr(error: BaseException) -> str:
    try:
        return repr(error)
    except Exception:  # the exception's own repr failed
        return type(error).__name__
