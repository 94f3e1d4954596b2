"""The agent loop of one trajectory: generate, let the environment answer, and again until something ends it."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from skyrl_mega.config.derived import length_limit, response_limit
from skyrl_mega.config.schema import EnvironmentConfig, RolloutConfig
from skyrl_mega.envs import blame, checked, registry
from skyrl_mega.envs.base import Message
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.rollout.chat import Chat, Refused
from skyrl_mega.rollout.engine import Request
from skyrl_mega.rollout.router import Router
from skyrl_mega.rollout.threads import Call, GivenUp, Raised, Threads
from skyrl_mega.rollout.trajectory import Kind, Status, Step, Trajectory

LONGEST_ERROR = 2000
"""Characters of an environment's error that are kept."""
CUT = {"length": Status.TRUNCATED_TOKENS, "timeout": Status.TRUNCATED_TIME}
"""What a response that did not end by itself makes of its trajectory, even where the environment has graded it."""


@dataclass(frozen=True)
class Limits:
    """Token, turn and time budgets, and what an environment may do."""

    turn: int
    """Tokens of one turn."""
    response: int
    """Tokens of responses and observations, over all turns."""
    length: int
    """Tokens of the whole sequence: the engine's longest."""
    turns: int
    env_timeout_s: float
    trajectory_timeout_s: float | None = None
    """From the first request on; None has no end."""
    rewrites: bool = False
    """Whether an environment may put a new conversation in the place of the old one."""

    @classmethod
    def of(cls, rollout: RolloutConfig) -> Limits:
        """The budgets that the configuration sets, with its defaults filled in."""
        return cls(
            turn=rollout.sampling.max_tokens,
            response=response_limit(rollout),
            length=length_limit(rollout),
            turns=rollout.max_turns,
            env_timeout_s=rollout.env_timeout_s,
            trajectory_timeout_s=rollout.trajectory_timeout_s,
            rewrites=rollout.step_wise != "off",
        )

    def room(self, t: Trajectory) -> int:
        """Tokens that the next turn may have."""
        return min(self.turn, self.response - t.response_length, self.length - len(t.context))


class EnvironmentFault(Exception):
    """An environment raised, took too long or gave what it may not. Ends its own trajectory only."""

    def __init__(self, status: Status, text: str, at: str | None = None) -> None:
        self.status, self.at = status, at
        super().__init__(text)


@dataclass
class Opened:
    """A trajectory before its first turn."""

    trajectory: Trajectory
    env: Any
    """None where the environment failed."""
    clock: float
    """`time.perf_counter()` at its opening."""
    until: float | None = None
    """`time.perf_counter()` at which its time is over; known once it is played."""

    @property
    def seconds(self) -> float:
        """Since its opening."""
        return time.perf_counter() - self.clock

    @property
    def left(self) -> float | None:
        """Seconds of its time that are left; None where that has no end."""
        return None if self.until is None else self.until - time.perf_counter()


class Said(NamedTuple):
    """One turn of the policy."""

    text: str
    tokens: int
    finish: str
    """What ended it: `stop`, `length` or `timeout`."""


class Agent:
    """Plays trajectories. Stateless between them.

    `begin`, `speak` and `hear` are all that knows of tokens; a subclass that overrides them speaks another way.

    Args:
        router: Where tokens come from.
        chat: Tokenizer and template.
        environments: Which classes there are.
        limits: Budgets.
        threads: Runs environments, so that one that blocks holds up nobody else.
    """

    def __init__(
        self, router: Router, chat: Chat, environments: EnvironmentConfig, limits: Limits, threads: Threads
    ) -> None:
        self.router, self.chat, self.limits = router, chat, limits
        self.environments, self.threads = environments, threads

    async def open(self, prompt: Prompt, sample: int) -> Opened:
        """Makes the environment and the first tokens; a fault of the environment is kept as the trajectory's end."""
        opened = Opened(Trajectory(prompt, sample, [], [], [], 0, 0.0, Status.TRUNCATED_TURNS, 0), None, 0.0)
        opened.clock = time.perf_counter()
        t = opened.trajectory
        t.seconds = {"generate": 0.0, "env": 0.0}
        t.steps = [Step(Kind.PROMPT, 0, 0)]
        made: list[Any] = []
        call = Call(self._make, prompt, made, late=lambda: [env.close() for env in made])
        try:
            messages = await self._env(t, "init", call)
            tokens = self._tokens(t, "init: messages", self.first, messages)
        except EnvironmentFault as fault:
            _fail(t, fault)
            messages, tokens = prompt.messages, self.first(prompt.messages)
            opened.env = made[0] if made else None
            await self.close(opened)
        except asyncio.CancelledError:
            if made and not call.given_up:  # else the thread closes it when it comes back
                opened.env = made[0]
                await self.close(opened)
            raise
        else:
            opened.env = made[0]
        append(t, tokens, 0)
        _say(t, messages)
        t.prompt_length = len(t.tokens)
        return opened

    def _make(self, prompt: Prompt, made: list[Any]) -> list[Message]:
        """The first messages; `made` gets the environment, also where its `init` fails: it is closed all the same."""
        made.append(registry.make(prompt.env_class, prompt.extras, self.environments, self.limits.turns))
        return checked.init(made[0], list(prompt.messages))

    async def play(self, opened: Opened, name: str) -> Trajectory:
        """Plays to the end. What the policy produced enters `tokens` as it came and is never tokenised again.

        Args:
            opened: From `open`.
            name: Names this trajectory's requests and their random stream; no other has it.
        """
        t = opened.trajectory
        if opened.env is None:
            return t
        if self.limits.trajectory_timeout_s is not None:
            opened.until = time.perf_counter() + self.limits.trajectory_timeout_s
        try:
            while not await self._turn(opened, name):
                pass
        except EnvironmentFault as fault:
            _fail(t, fault)
        finally:
            await self.close(opened)
        return t

    async def _turn(self, opened: Opened, name: str) -> bool:
        """One turn; True when the trajectory has ended, with its status set."""
        t = opened.trajectory
        room = self.limits.room(t)
        if room < 1:
            t.status = Status.TRUNCATED_TOKENS
            return True
        said = await self.speak(opened, f"{name}/{t.turns}", room)
        t.seconds["generate"] += t.steps[-1].generate_s
        cut = CUT.get(said.finish)
        if cut and not said.tokens:  # it was over before the first one
            t.status = cut
            return True
        t.turns += 1
        _say(t, [{"role": "assistant", "content": said.text}])

        step = t.steps[-1]
        call = Call(checked.step, opened.env, said.text, late=opened.env.close)
        try:
            answer = await self._env(t, "step", call)
        except asyncio.CancelledError:
            if call.given_up:  # its thread is still inside, and closes it when it comes back
                opened.env = None
            raise
        step.reward, step.tool_calls = answer.reward, answer.tool_calls
        t.reward += answer.reward
        t.metadata = answer.metadata

        t.steps.append(Step(Kind.OBSERVATION, step.end, step.end, at_s=opened.seconds))
        _say(t, answer.messages or answer.observations)
        if answer.done or cut:
            t.status = cut or Status.COMPLETED
        elif t.turns == self.limits.turns:
            t.status = Status.TRUNCATED_TURNS
        elif opened.left is not None and opened.left <= 0:
            t.status = Status.TRUNCATED_TIME
        else:
            return self._goes_on(t, answer)
        return True

    async def speak(self, opened: Opened, name: str, room: int) -> Said:
        """Has the policy speak, and puts what it said into the tokens, with the step that tells of it.

        Args:
            opened: The trajectory so far.
            name: Names this turn and its random stream; no other has it.
            room: Tokens at most.
        """
        t, start = opened.trajectory, opened.seconds
        completion = await self.router.generate(Request(name, t.context, room, stream_seed(name), opened.left))
        end = len(t.tokens)
        spent = opened.seconds - start
        t.steps.append(Step(Kind.RESPONSE, end, end, at_s=start, generate_s=spent, finish=completion.finish))
        t.versions += [(version, end + first) for version, first in completion.versions]
        append(t, completion.tokens, 1, completion.logprobs)
        return Said(self.chat.text(completion.tokens), len(completion.tokens), completion.finish)

    def first(self, messages: list[Message]) -> list[int]:
        """Tokens of a conversation's opening, up to where the policy speaks."""
        return self.chat.first(messages)

    def following(self, t: Trajectory, observations: list[Message]) -> list[int]:
        """Tokens from the end of the policy's words up to where it speaks again."""
        return self.chat.following(t.tokens[-1], observations)

    def _goes_on(self, t: Trajectory, answer: checked.StepOutput) -> bool:
        """Adds the tokens of what the environment said; True where they leave no room for a turn, and are left out."""
        if answer.messages is None:
            new = self._tokens(t, "step: observations", self.following, t, answer.observations)
            response, length = t.response_length + len(new), len(t.context) + len(new)
        else:
            if not self.limits.rewrites:
                text = "step: messages is a new conversation; that needs rollout.step_wise, turns or merged"
                raise self._fault(t, Status.ERROR_ENV, text)
            new = self._tokens(t, "step: messages", self.first, answer.messages)
            response, length = t.response_length, len(new)
        if response >= self.limits.response or length >= self.limits.length:
            t.status = Status.TRUNCATED_TOKENS
            return True
        if answer.messages is not None:
            t.steps[-1].kind = Kind.PROMPT
        append(t, new, 0)
        return False

    def _tokens(self, t: Trajectory, what: str, render: Callable[..., list[int]], *args: Any) -> list[int]:
        """Tokens of an environment's messages; those that the template refuses are the environment's fault."""
        try:
            return render(*args)
        except Refused as error:
            raise self._fault(t, Status.ERROR_ENV, f"{what}: {error}") from error

    async def _env(self, t: Trajectory, what: str, call: Call) -> Any:
        """Runs the environment's code in a thread.

        Raises:
            EnvironmentFault: It raised, took longer than its limit, or gave what the contract does not allow.
        """
        limit = self.limits.env_timeout_s
        try:
            return await self.threads.run(call, limit)
        except GivenUp:
            text = f"{what} took longer than rollout.env_timeout_s={limit:g}"
            raise self._fault(t, Status.ERROR_ENV_TIMEOUT, text) from None
        except Raised as raised:
            error = raised.error
            text = str(error) if isinstance(error, checked.BadOutput) else f"{what} raised {_shown(error)}"
            raise self._fault(t, Status.ERROR_ENV, text, error) from error
        finally:
            t.seconds["env"] += call.seconds()
            t.steps[-1].env_s += call.seconds()

    def _fault(self, t: Trajectory, status: Status, text: str, error: BaseException | None = None) -> EnvironmentFault:
        """What is kept of a fault, with the place in the environment's own file that it came from."""
        text = text.encode(errors="backslashreplace").decode()[:LONGEST_ERROR]
        at = blame.place(error, t.prompt.env_class, self.environments)
        return EnvironmentFault(status, f"environment {t.prompt.env_class}: {text}", at)

    async def close(self, opened: Opened) -> None:
        """Closes the environment where that has not been done: `play` does, so this is for what is never played."""
        t, env = opened.trajectory, opened.env
        opened.env = None
        if env is None or t.status is Status.ERROR_ENV_TIMEOUT:
            return  # a thread is still inside it, and closes it when it comes back
        try:
            await self._env(t, "close", Call(env.close))
        except EnvironmentFault as fault:  # the trajectory itself is whole
            t.metadata["close_error"] = f"{fault} (at {fault.at})" if fault.at else str(fault)


def append(t: Trajectory, tokens: list[int], mask: int, logprobs: list[float] | None = None) -> None:
    """Tokens of the last step."""
    t.tokens += tokens
    t.mask += [mask] * len(tokens)
    t.logprobs += [0.0] * len(tokens) if logprobs is None else logprobs
    t.steps[-1].end = len(t.tokens)


def _say(t: Trajectory, messages: list[Message]) -> None:
    """Messages of the last step."""
    t.messages += messages
    t.steps[-1].messages += len(messages)


def _fail(t: Trajectory, fault: EnvironmentFault) -> None:
    t.status, t.reward, t.metadata = fault.status, 0.0, {"error": str(fault)}
    if fault.at:
        t.metadata["at"] = fault.at


def _shown(error: BaseException) -> str:
    try:
        return repr(error)
    except Exception:  # its own words failed it
        return type(error).__name__


def stream_seed(name: str) -> int:
    """A 63-bit seed that depends on all of a name."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) >> 1
