"""Trial of a generator before a run: a call with stand-ins for engines, tokenizer and environment.

Without a trial, an error of the generator appears only in the first step, after the start of engines and the warm-up.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from skyrl_mega.common import trials
from skyrl_mega.common.errors import UserError
from skyrl_mega.common.values import shown
from skyrl_mega.config.schema import Config, EnvironmentConfig
from skyrl_mega.engines.base import Completion, Request
from skyrl_mega.envs import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_mega.envs.base import Message
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.rollout.agent.agent_loop import Agent
from skyrl_mega.rollout.agent.env_pool import EnvPool
from skyrl_mega.rollout.agent.limits import TrajectoryLimits
from skyrl_mega.rollout.generators import finish, load
from skyrl_mega.rollout.generators.base import TrajectoryGenerator
from skyrl_mega.rollout.generators.group_state import GeneratorFault, GroupRequest
from skyrl_mega.rollout.generators.service import GeneratorService
from skyrl_mega.trajectories.trajectory import Status

LONGEST_S = 30.0
"""Seconds for a call of `generate` that awaits, with stand-ins, which answer at once; below `trials.LONGEST_S`."""
TRIALS = 4
"""Number of prompts tried, with different answers."""
END, LETTERS = 0, range(97, 123)
"""End-of-turn token of the stand-ins, and the tokens of their answers: code points."""


def check(config: Config) -> None:
    """Checks that `rollout.generator` can be loaded, and that its `generate` returns judged trajectories for a few
    prompts with stand-ins. Does nothing without a generator.

    Raises:
        UserError: The generator cannot be loaded, raises, returns something else, does not end, or asks for other
            tokens in a second call with the same random streams.
    """
    generator = load.create(config.rollout)
    if generator is None:
        return
    for number in range(TRIALS):
        first, second = (_try(generator, config, number) for _ in range(2))
        if first != second:
            raise UserError(
                f"{type(generator).__name__}.generate asks the policy differently in a second call with the same "
                "answers, so that an interrupted group could not be resumed; take random numbers from service.random()",
                key=load.KEY,
                value=config.rollout.generator,
            )


def _try(generator: TrajectoryGenerator, config: Config, number: int) -> list[tuple[str, bytes]]:
    """Makes a group with stand-ins and returns the name and the tokens of each request, in order of the names."""
    policy = _Policy()

    async def play() -> None:
        environments = EnvironmentConfig(classes={"trial": f"{__name__}:TrialEnv"})
        limits = TrajectoryLimits.of(config.rollout)
        agent = Agent(policy, _Chat(), environments, limits, EnvPool(1))  # type: ignore[arg-type]
        prompt = Prompt(number, [{"role": "user", "content": "q"}], "trial", {"reward_spec": {}, "extra_info": {}})
        names = tuple(f"trial/{number}/{sample}" for sample in range(config.data.samples_per_prompt))
        service = GeneratorService(agent, GroupRequest(prompt, names))
        try:
            async with asyncio.timeout(LONGEST_S):
                returned = await generator.generate(service.group, service)
            made = finish.trajectories(returned, service, generator)
        finally:
            await service.close()
        if broken := next((t for t in made if t.status is Status.ERROR_ENV), None):
            raise GeneratorFault(str(broken.metadata["error"]))

    try:
        with trials.limited():
            asyncio.run(play())
    except trials.FAULTS as error:
        raise _refusal(error, generator, config) from error
    return sorted(policy.asked)


def _refusal(error: BaseException, generator: TrajectoryGenerator, config: Config) -> UserError:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    name, place = type(generator).__name__, trials.place(error, generator)
    text = f"generator {name}: {error}"
    if isinstance(error, TimeoutError):
        text = f"{name}.generate did not end within {LONGEST_S:g} s, although the stand-ins answer at once{place}"
    elif isinstance(error, trials.Endless):
        text = f"{name}.generate {error}{place}"
    elif not isinstance(error, GeneratorFault):
        text = f"{name}.generate raised {type(error).__name__}: {shown(str(error))}{place}"
    fix = "see docs/generators.md for what generate is given and returns"
    return UserError(text, key=load.KEY, value=config.rollout.generator, fix=fix)


class TrialEnv(BaseTextEnv):
    """An environment that judges a single turn by its length."""

    blocking = False

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Returns the number of characters of the answer (`action`) as the reward, without messages or metadata, and
        ends the trajectory."""
        return BaseTextEnvStepOutput(observations=[], reward=float(len(action)), done=True, metadata={})


class _Policy:
    """A router whose answers depend on the request's random stream alone."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, bytes]] = []

    async def generate(self, request: Request) -> Completion:
        self.asked.append((request.id, array("i", request.tokens).tobytes()))
        random = Random(request.seed)
        tokens = [random.choice(LETTERS) for _ in range(min(request.max_tokens, random.randint(0, 7)))]
        finish_reason = "length" if len(tokens) == request.max_tokens else "stop"
        if finish_reason == "stop":
            tokens.append(END)
        logprobs = [-random.random() for _ in tokens]
        return Completion(request.id, tokens, logprobs, finish_reason, ((0, 0),))


class _Chat:
    """A tokenizer and chat template of one token per character."""

    one_message = False
    stop_tokens, end = (END,), END

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        return self.encode("".join(f"{message['role']}:{message['content']}\n" for message in messages))

    def following(self, last: int, observations: Sequence[Message], tools: Any = ()) -> list[int]:
        return [*([] if last == END else [END]), *self.render(observations)]

    def text(self, tokens: Sequence[int]) -> str:
        return "".join(chr(token) for token in tokens if token != END)

    def encode(self, text: str) -> list[int]:
        return [*map(ord, text)]
