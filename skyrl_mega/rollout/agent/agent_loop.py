"""The agent loop of a trajectory: generate a turn, let the environment answer, repeat until the trajectory ends."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from skyrl_mega.config.schema import EnvironmentConfig
from skyrl_mega.engines.base import Request
from skyrl_mega.envs import validate
from skyrl_mega.envs.base import BaseTextEnv, Message
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.rollout.agent import edits
from skyrl_mega.rollout.agent.agent_run import run_agent
from skyrl_mega.rollout.agent.env_pool import EnvPool
from skyrl_mega.rollout.agent.environment import Environment, EnvironmentFault
from skyrl_mega.rollout.agent.limits import TrajectoryLimits
from skyrl_mega.rollout.agent.opened import Opened
from skyrl_mega.rollout.agent.renderer import Renderer, TemplateError, TooLong
from skyrl_mega.rollout.agent.seeds import stream_seed
from skyrl_mega.rollout.endpoint.session import AgentSession
from skyrl_mega.rollout.gate import Start
from skyrl_mega.rollout.routing.router import Router
from skyrl_mega.telemetry.trace import Span
from skyrl_mega.trajectories.trajectory import Kind, Status, Trajectory, new_trajectory

PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Seconds before the first retry and before any retry: the pause doubles with each retry, as the service under the
environment may be recovering."""
Tools = Sequence[Mapping[str, Any]]
"""Tools offered to the policy, in the format of chat templates."""
CUT_STATUS = {"length": Status.TRUNCATED_TOKENS, "timeout": Status.TRUNCATED_TIME}
"""Finish reason of a cut response → status of the trajectory, even if the environment graded the response."""


class PolicyTurn(NamedTuple):
    """A turn of the policy."""

    text: str
    """The turn's text without the end-of-turn token."""
    tokens: int
    """Number of tokens, including the end-of-turn token."""
    finish: str
    """Reason for the end of the turn: `stop`, `length` or `timeout`."""


class Agent:
    """An agent that runs trajectories in this process; keeps no state between trajectories.

    Only `first`, `generate_turn` and `following` handle tokens; a subclass may override the three for another protocol.

    Args:
        router: Sends requests to the engines.
        chat: Tokenizer and chat template.
        environments: Environment classes of the run.
        limits: Limits of a trajectory.
        threads: Runs environments, so that a blocking environment delays no other trajectory.
        reward_weights: `algorithm.reward_weights`.
        retries: Most retries of a trajectory after infrastructure faults (`environment.retries`).
    """

    def __init__(
        self,
        router: Router,
        chat: Renderer,
        environments: EnvironmentConfig,
        limits: TrajectoryLimits,
        threads: EnvPool,
        *,
        reward_weights: Mapping[str, float] | None = None,
        retries: int = 0,
    ) -> None:
        self.router, self.chat, self.limits = router, chat, limits
        self.environments, self.threads = environments, threads
        self.reward_weights, self.retries = reward_weights or {}, retries
        self.classes: dict[str, type[BaseTextEnv]] = {}
        """The environment classes used so far, by name."""
        self.spans: Callable[[], list[Span] | None] = lambda: None
        """Returns the list that records environment calls at present, or None."""

    @property
    def one_message(self) -> bool:
        """True if all turns and observations form a single assistant message (`rollout.conversation`)."""
        return self.chat.one_message

    async def play(self, prompt: Prompt, sample: int, name: str, start: Start | None = None) -> Trajectory:
        """Runs a trajectory from opening to closing the environment and returns the trajectory. Tokens of the policy
        enter `tokens` unchanged and are never tokenised again. A fault of the environment is not raised: the trajectory
        gets reward 0, and its status and metadata describe the fault.

        After an infrastructure fault the same trajectory is retried from the prompt, up to `retries` times: the
        requests keep the same names, and therefore the same random streams. Faults of the environment or the policy are
        not retried. `play` waits before a retry, 1 s at first and up to 60 s.

        Args:
            prompt: The prompt.
            sample: Number of the sample within the prompt, from 0.
            name: Unique name; the source of the requests' names and random stream.
            start: Awaited between opening the environment and the first turn (`Gate`); None: the first turn follows at
                once.

        Raises:
            NoServingActor: No engine is left, in a phase.
            ActorFailed: An engine refused a request, or the restart budget is used up.
            WrongRoutes: The engine's routes do not match the tokens.
            UserError: The chat template leaves out the assistant's words.
        """
        for retries in itertools.count():
            opened = await self.open(prompt, sample)
            t = opened.trajectory
            t.retries = retries
            if not self._may_retry(t):
                await self._run(opened, name, start)
            if not self._may_retry(t):
                return t
            await pause(retries)
        raise AssertionError

    def _may_retry(self, t: Trajectory) -> bool:
        return t.status is Status.ERROR_INFRASTRUCTURE and t.retries < self.retries

    def environment(self, t: Trajectory) -> Environment:
        """Returns the environment of a trajectory, not opened yet."""
        return Environment(t, self.environments, self.threads, self.limits.env_timeout_s, self.spans, self.classes)

    async def open(self, prompt: Prompt, sample: int) -> Opened:
        """Creates the environment of a new trajectory, tokenises the conversation's first messages, and returns the
        trajectory in progress, before the first turn.

        A fault of the environment is not raised: it ends the trajectory with reward 0, closes the environment, and is
        stored in the trajectory's status and metadata.

        Args:
            prompt: The prompt.
            sample: Number of the sample within the prompt, from 0.
        """
        t = new_trajectory(prompt, sample)
        env = self.environment(t)
        opened = Opened(t, env, time.perf_counter())
        try:
            messages = await env.open(self.limits.turns, self.chat)
            t.tools = env.tools
            tokens: Sequence[int] = []
            if not env.is_agent:  # an agent decides what the policy sees
                tokens = self._tokens(opened, "init: messages", self.first, messages, env.tools)
            if len(tokens) >= self.limits.length:
                text = f"init: messages and tools of {len(tokens)} tokens leave no room for a turn"
                limit = f"a sequence has at most {self.limits.length} (rollout.max_length)"
                raise env.fault(Status.ERROR_ENV, f"{text}: {limit}")
        except EnvironmentFault as fault:
            edits.fail(t, fault.status, fault.about)
            messages, tokens = prompt.messages, self._prompt_tokens(prompt)
            await env.close()
        except asyncio.CancelledError:
            await env.close()
            raise
        edits.set_prompt(t, messages, tokens)
        return opened

    def failed_trajectory(self, prompt: Prompt, sample: int, fault: str) -> Trajectory:
        """Returns a trajectory without a turn, with only the prompt, reward 0 and status ERROR_INFRASTRUCTURE, for a
        trajectory that cannot be run. Opens no environment.

        Args:
            prompt: The prompt.
            sample: Number of the sample within the prompt, from 0.
            fault: Description of the fault, stored in the trajectory.
        """
        t = new_trajectory(prompt, sample)
        edits.fail(t, Status.ERROR_INFRASTRUCTURE, {"error": fault})
        edits.set_prompt(t, prompt.messages, self._prompt_tokens(prompt))
        return t

    def _prompt_tokens(self, prompt: Prompt) -> Sequence[int]:
        """Returns a prompt's tokens for a trajectory that never runs; an end token if the template rejects it."""
        try:
            return self.first(prompt.messages)
        except TemplateError:
            return [self.chat.end]

    async def _run(self, opened: Opened, name: str, start: Start | None) -> None:
        """Runs an opened trajectory to the end and closes the environment."""
        t = opened.trajectory
        try:
            if start is not None:
                await start()
            if not opened.env.is_open:
                return
            if opened.env.is_agent:
                await self._run_agent(opened, name)
                return
            opened.until = self.limits.deadline()
            while not await self._turn(opened, name):
                pass
            self.end_message(t)
        except EnvironmentFault as fault:
            edits.fail(t, fault.status, fault.about)
        finally:
            await opened.env.close()
        opened.routes.keep(t)
        opened.token_rewards.keep(t)

    def end_message(self, t: Trajectory) -> None:
        """Appends the end token to the last response if a stop string ended the response and a token fits. The token
        counts as the policy's, with log-prob NaN. Changes nothing unless `rollout.conversation` is `one_message`."""
        if self.one_message and t.status is not Status.TRUNCATED_TOKENS and self.limits.room(t) >= 1:
            edits.end_message(t, self.chat.end, self.chat.stop_tokens)

    async def _run_agent(self, opened: Opened, name: str) -> None:
        """Runs the agent of an opened trajectory to its end. Waits first until fewer than `environment.workers` agents
        work, and for `prepare` of the environment; both do not count towards the trajectory's time limit."""
        t = opened.trajectory
        try:
            async with self.threads.agents:
                await opened.env.prepare()
                opened.until = self.limits.deadline()
                session = AgentSession(
                    name, self.router, self.chat, self.limits, opened_at=opened.clock, until=opened.until
                )
                await run_agent(opened, session, self.limits, self.reward_weights)
        finally:
            if not t.tokens:
                edits.append(t, self._prompt_tokens(t.prompt), 0)
                t.prompt_length = len(t.tokens)

    async def _turn(self, opened: Opened, name: str) -> bool:
        """Runs a turn. Returns True after the last turn, with the trajectory's status set."""
        t = opened.trajectory
        room = self.limits.room(t)
        if room < 1:
            t.status = Status.TRUNCATED_TOKENS
            return True
        turn = await self.generate_turn(opened, f"{name}/{t.turns}", room)
        t.seconds["generate"] += t.steps[-1].generate_s
        if turn.finish in CUT_STATUS and not turn.tokens:  # the time was over before the first token
            await self.end_without_answer(opened, turn.finish)
            return True
        t.turns += 1
        return await self.judge(opened, turn)

    async def end_without_answer(self, opened: Opened, finish: str) -> None:
        """Ends a trajectory whose time or tokens were used up before the first token of a turn: sets the status, and
        after a timeout lets the environment grade the trajectory.

        Args:
            opened: The trajectory.
            finish: Reason for the end, `length` or `timeout`.

        Raises:
            EnvironmentFault: See `Environment.out_of_time`.
        """
        opened.trajectory.status = CUT_STATUS[finish]
        await self._out_of_time(opened)

    async def judge(self, opened: Opened, turn: PolicyTurn) -> bool:
        """Lets the environment judge the trajectory's last turn, and appends the reward and the environment's messages.
        Returns True if the trajectory has ended, with the status set; False if another turn follows.

        Args:
            opened: The trajectory; its last step is the response, with at least one token, and `turns` counts it.
            turn: The turn.

        Raises:
            EnvironmentFault: The environment failed, or its messages are not allowed.
            UserError: The chat template leaves out the assistant's words.
        """
        t, cut = opened.trajectory, CUT_STATUS.get(turn.finish)
        edits.append_messages(t, [{"role": "assistant", "content": turn.text}])

        step = t.steps[-1]
        answer = await opened.env.step(turn.text, self.reward_weights)
        step.tool_calls = answer.tool_calls
        if answer.rewards_at:  # in a thread: decoding a long answer token by token is slow
            await asyncio.to_thread(opened.token_rewards.add, t, self.chat.text, answer.rewards_at)
        edits.add_reward(t, step, answer)
        t.metadata = answer.metadata

        edits.begin(t, Kind.OBSERVATION, opened.seconds)
        edits.append_messages(t, answer.messages or answer.observations)
        if answer.done or cut:
            t.status = cut or Status.COMPLETED
            if not answer.done:
                await self._out_of_time(opened)
        elif t.turns == self.limits.turns:
            t.status = Status.TRUNCATED_TURNS
        elif opened.left is not None and opened.left <= 0:
            t.status = Status.TRUNCATED_TIME
            await self._out_of_time(opened)
        else:
            return self.append_answer(opened, answer)
        return True

    async def _out_of_time(self, opened: Opened) -> None:
        """Asks the environment to grade a trajectory that ran out of time between turns and may not be graded yet."""
        t = opened.trajectory
        step = edits.last_response(t)
        if t.status is not Status.TRUNCATED_TIME or step is None:
            return
        answer = await opened.env.out_of_time(self.reward_weights)
        if answer is not None:
            edits.add_reward(t, step, answer)
            t.metadata |= answer.metadata

    async def generate_turn(self, opened: Opened, name: str, room: int) -> PolicyTurn:
        """Generates the policy's next turn on an engine, appends a step and the turn's tokens, log-probs and weight
        versions to the trajectory, and returns the turn.

        Args:
            opened: The trajectory so far.
            name: Unique name of the turn, and source of the random stream.
            room: Most tokens of the turn.

        Raises:
            NoServingActor: No engine is left, in a phase.
            ActorFailed: The engine refused the request, or the restart budget is used up.
            WrongRoutes: The engine's routes do not match the tokens.
        """
        t, start = opened.trajectory, opened.seconds
        first = opened.routes.first(t)
        begins = None if t.turns else t.prompt.uid
        request = Request(name, t.context, room, stream_seed(name), opened.left, first, prompt=begins)
        completion = await self.router.generate(request)
        opened.routes.add(t, completion)
        edits.add_response(t, completion, at_s=start, generate_s=opened.seconds - start)
        return PolicyTurn(self.chat.text(completion.tokens), len(completion.tokens), completion.finish)

    def first(self, messages: list[Message], tools: Tools = ()) -> Sequence[int]:
        """Returns the tokens of the first messages, up to the point at which the policy generates. Raises TemplateError
        or TooLong as `Renderer.render` does."""
        return self.chat.render(messages, tools)

    def following(self, t: Trajectory, observations: list[Message], tools: Tools = ()) -> list[int]:
        """Returns the tokens between the policy's last token, the end of `t.tokens`, and the policy's next turn: the
        end of the turn if not produced yet, the observations and the opening of the next turn. Do not modify the
        result. Raises TemplateError, TooLong or UserError as `Renderer.following` does."""
        return self.chat.following(t.tokens[-1], observations, tools)

    def append_answer(self, opened: Opened, answer: validate.StepOutput) -> bool:
        """Appends the tokens of the environment's messages and returns False. If the messages leave no room for another
        turn, appends nothing, sets the status TRUNCATED_TOKENS and returns True.

        Args:
            opened: The open trajectory, changed in place.
            answer: The environment's answer to the policy's last turn.

        Raises:
            EnvironmentFault: The chat template rejects the messages, or the environment replaced the conversation
                without permission (`rollout.step_wise`).
            UserError: The chat template leaves out the assistant's words.
        """
        t, tools = opened.trajectory, opened.env.tools
        if answer.messages is None:
            new = self._tokens(opened, "step: observations", self.following, t, answer.observations, tools)
            more = len(new) - (self.one_message and self._ended(t))
            response, length = t.response_length + more, len(t.context) + more
        else:
            if not self.limits.rewrites:
                text = "step: messages is a new conversation; that needs rollout.step_wise=turns or merged"
                raise opened.env.fault(Status.ERROR_ENV, text)
            new = self._tokens(opened, "step: messages", self.first, answer.messages, tools)
            response, length = t.response_length, len(new)
        most = self.limits.input
        too_long = length >= self.limits.length or (most is not None and length > most)
        if response >= self.limits.response or too_long:
            t.status = Status.TRUNCATED_TOKENS
            return True
        if answer.messages is not None:
            t.steps[-1].kind = Kind.PROMPT
        elif self.one_message and self._ended(t):
            edits.remove_end(t)
        edits.append(t, new, 0)
        return False

    def _ended(self, t: Trajectory) -> bool:
        """Returns True if the policy's last token ends the message."""
        return bool(t.tokens) and t.tokens[-1] in self.chat.stop_tokens

    def _tokens(self, opened: Opened, what: str, render: Callable[..., Sequence[int]], *args: Any) -> Sequence[int]:
        """Returns the tokens of an environment's messages; raises the environment's fault for rejected messages."""
        try:
            return render(*args)
        except TemplateError as error:
            raise opened.env.fault(Status.ERROR_ENV, f"{what}: {error}") from error
        except TooLong as error:
            return range(error.tokens)  # longer than every limit, so rejected by the caller


async def pause(retries: int) -> None:
    """Waits before a retry after an infrastructure fault: 1 s before the first, twice as long before each further
    retry, 60 s at most.

    Args:
        retries: Number of earlier retries.
    """
    await asyncio.sleep(min(LONGEST_PAUSE_S, PAUSE_S * 2**retries))
