"""A policy for generators: answers that depend on a request's random stream alone."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

from skyrl_mega.config.schema import EnvironmentConfig
from skyrl_mega.engines.base import Completion, Request
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.models.char_tokenizer import EOS
from skyrl_mega.rollout.agent.agent_loop import Agent
from skyrl_mega.rollout.agent.env_pool import EnvPool
from skyrl_mega.rollout.agent.limits import TrajectoryLimits
from skyrl_mega.rollout.agent.renderer import Renderer
from skyrl_mega.rollout.generators import Branch, GeneratorService, GroupRequest, TrajectoryGenerator
from skyrl_mega.rollout.generators.group_player import GroupPlayer
from skyrl_mega.trajectories.trajectory import Trajectory

USER = EnvironmentConfig(classes={"talk": "tests.rollout.user_envs:Talk", "faulty": "tests.rollout.user_envs:Faulty"})


class RandomPolicy:
    """A stand-in for the router. The weights change in the middle of most answers.

    Args:
        chat: Renderer for the tokens.
        longest: Most letters of an answer.
    """

    def __init__(self, chat: Renderer, longest: int = 12) -> None:
        self.letters, (self.end,) = chat.encode("abcdefgh"), chat.encode(EOS)
        self.longest = longest
        self.requests: dict[str, Request] = {}
        self.answers: dict[str, Completion] = {}

    def expect(self, players: int) -> None:
        """Does nothing: no player waits for others."""

    def leave(self) -> None:
        """Does nothing, like `expect`."""

    def close(self) -> None:
        """Does nothing: no request is in flight."""

    async def generate(self, request: Request) -> Completion:
        """Returns random letters, ended by the end token if the limit allows."""
        assert request.id not in self.requests
        random = Random(request.seed)
        await asyncio.sleep(random.random() / 1000)
        tokens = [*random.choices(self.letters, k=random.randint(0, self.longest)), self.end][: request.max_tokens]
        finish = "stop" if tokens[-1] == self.end else "length"
        logprobs = array("f", [-random.random() for _ in tokens])
        versions = ((3, 0), (4, len(tokens) // 2)) if len(tokens) > 1 else ((3, 0),)
        self.requests[request.id] = request
        self.answers[request.id] = Completion(request.id, tokens, logprobs, finish, versions)
        return self.answers[request.id]


class Independent(TrajectoryGenerator):
    """The built-in agent loop as a generator."""

    async def generate(self, group: GroupRequest, service: GeneratorService) -> list[Branch]:
        """Returns independent trajectories."""

        async def play(sample: int) -> Branch:
            branch = await service.open(sample)
            while not branch.done:
                branch = await (await branch.sample()).step()
            return branch

        return await asyncio.gather(*(play(sample) for sample in range(group.samples)))


def agent_of(
    chat: Renderer, policy: Any, environments: EnvironmentConfig = USER, retries: int = 0, **limits: Any
) -> Agent:
    """Returns an agent with this policy."""
    given: Mapping[str, Any] = {**dict(turn=10, response=80, length=400, turns=3, env_timeout_s=60.0), **limits}
    return Agent(policy, chat, environments, TrajectoryLimits(**given), EnvPool(4), retries=retries)


def prompt_of(uid: int = 0, env: str = "talk", content: str = "hello", **extra: Any) -> Prompt:
    """Returns a prompt."""
    return Prompt(uid, [{"role": "user", "content": content}], env, {"reward_spec": {}, "extra_info": extra})


def play_group(agent: Agent, generator: TrajectoryGenerator, prompt: Prompt, samples: int = 4) -> list[Trajectory]:
    """Makes a group."""
    names = [f"0/1/{sample}" for sample in range(samples)]
    return asyncio.run(GroupPlayer(agent, generator).play_group(prompt, names))


def sampled_as_trained(trajectories: list[Trajectory], policy: RandomPolicy) -> None:
    """Checks that each trained token has the context, the log-prob and the version with which an engine sampled it."""
    by_context: dict[tuple[int, ...], list[tuple[int, float, int]]] = {}
    for name, request in policy.requests.items():
        answer = policy.answers[name]
        for i, (token, logprob) in enumerate(zip(answer.tokens, answer.logprobs, strict=True)):
            version = max(v for v, first in answer.versions if first <= i)
            by_context.setdefault((*request.tokens, *answer.tokens[:i]), []).append((token, logprob, version))
    for t in trajectories:
        start = 0
        for step in t.steps:
            start = step.start if step.kind == "prompt" else start
            for position in range(step.start, step.end):
                if t.mask[position]:
                    version = [v for v, first in t.versions if first <= position][-1]
                    known = by_context[tuple(t.tokens[start:position])]
                    assert (t.tokens[position], t.logprobs[position], version) in known
        assert all(logprob == 0 for logprob, mask in zip(t.logprobs, t.mask, strict=True) if not mask)


def write_class(folder: Path, body: str, name: str = "mine") -> str:
    """Writes a generator class `Mine` with these lines in `generate`, and returns its import path."""
    lines = "\n".join(f"        {line}" for line in body.strip().splitlines())
    (folder / f"{name}.py").write_text(
        "import asyncio\nfrom skyrl_mega.rollout.generators import TrajectoryGenerator\n\n\n"
        f"class Mine(TrajectoryGenerator):\n    async def generate(self, group, service):\n{lines}\n"
    )
    return f"{folder / name}.py:Mine"
