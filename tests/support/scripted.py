"""A policy with scripted answers, as no model answers on demand."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from skyrl_mega.config.schema import EnvironmentConfig
from skyrl_mega.engines.base import Completion, Request
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.rollout.agent.agent_loop import Agent
from skyrl_mega.rollout.agent.env_pool import EnvPool
from skyrl_mega.rollout.agent.limits import TrajectoryLimits
from skyrl_mega.rollout.agent.renderer import Renderer
from skyrl_mega.trajectories.trajectory import Trajectory


class Scripted:
    """A stand-in for the router; `turns` records requests and answers in order.

    Args:
        chat: Renderer for the tokens.
        lines: The answers; end-of-sequence tokens are written out.
        finish: Reason for the end of each turn.
    """

    def __init__(self, chat: Renderer, lines: Sequence[str], finish: str = "stop") -> None:
        self.chat, self.lines, self.finish = chat, iter(lines), finish
        self.turns: list[tuple[Request, Completion]] = []

    def expect(self, players: int) -> None:
        """Does nothing: no player waits for others."""

    def leave(self) -> None:
        """Does nothing, like `expect`."""

    def close(self) -> None:
        """Does nothing: no request is in flight."""

    async def generate(self, request: Request) -> Completion:
        """Returns the next line; token i has the log-prob -1 - i / 8."""
        line = self.chat.encode(next(self.lines))
        tokens = line[: request.max_tokens]
        finish = self.finish if tokens == line else "length"
        completion = Completion(request.id, tokens, [-1 - i / 8 for i in range(len(tokens))], finish, ((0, 0),))
        self.turns.append((request, completion))
        return completion


def play(
    chat: Renderer,
    config: EnvironmentConfig,
    scripts: Sequence[tuple[Prompt, Scripted]],
    threads: int = 4,
    reward_weights: Mapping[str, float] | None = None,
    retries: int = 0,
    **limits: Any,
) -> list[Trajectory]:
    """Plays all scripts at once, each with a separate policy."""
    given = TrajectoryLimits(
        **{**dict(turn=4000, response=20_000, length=30_000, turns=4, env_timeout_s=60.0), **limits}
    )

    async def everything() -> list[Trajectory]:
        rooms = EnvPool(threads)

        async def one(prompt: Prompt, policy: Scripted) -> Trajectory:
            agent = Agent(
                policy,  # type: ignore[arg-type]
                chat,
                config,
                given,
                rooms,
                reward_weights=reward_weights,
                retries=retries,
            )
            return await agent.play(prompt, 0, f"{prompt.uid}")

        return await asyncio.gather(*(one(prompt, policy) for prompt, policy in scripts))

    return asyncio.run(everything())
