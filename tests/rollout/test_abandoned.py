"""Generation abandoned in the middle, at the end of a run."""

from __future__ import annotations

import asyncio
import gc
import time
from typing import Any

import pytest

from skyrl_mega.config.schema import EnvironmentConfig, SamplingConfig
from skyrl_mega.engines.base import Completion, Request
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.rollout import generator
from skyrl_mega.rollout.agent.agent_loop import Agent
from skyrl_mega.rollout.agent.env_pool import EnvPool
from skyrl_mega.rollout.agent.limits import TrajectoryLimits
from skyrl_mega.rollout.agent.renderer import Renderer
from skyrl_mega.rollout.generator import Generator
from skyrl_mega.trajectories.trajectory import Status
from tests.rollout.user_envs import Counted
from tests.support.scripted import Scripted, play

COUNTED = EnvironmentConfig(classes={"counted": "tests.rollout.user_envs:Counted"})


class Ending(BaseException):
    """Stands for the end of the run."""


def test_it_ends_soon_and_nobody_complains_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generator, "LOOK_EVERY_S", 0.01)
    nothing: Any = None
    looks = iter([False, False, True])
    complaints: list[dict[str, Any]] = []

    def look() -> None:
        if next(looks):
            raise Ending

    playing = Generator(nothing, nothing, nothing, COUNTED, look=look)

    async def phase() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
        tasks = [asyncio.create_task(asyncio.sleep(600)) for _ in range(3)]
        try:
            await playing._watched(asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    with pytest.raises(Ending):
        asyncio.run(phase())
    gc.collect()
    assert complaints == []


class Mute:
    """A router whose engine never answers."""

    def expect(self, players: int) -> None:
        """Does nothing: no player waits for others."""

    def leave(self) -> None:
        """Does nothing, like `expect`."""

    def close(self) -> None:
        """Does nothing: no request is in flight."""

    async def generate(self, request: Request) -> Completion:
        await asyncio.sleep(600)
        raise AssertionError


class Played(Generator):
    """A generator with a policy of the given lines, or without answers; ends the run at the `after`-th look."""

    def __init__(self, chat: Renderer, after: int, threads: int, lines: list[str] | None = None) -> None:
        looks = iter(range(after + 1))
        nothing: Any = None

        def look() -> None:
            if next(looks) == after:
                raise Ending

        super().__init__(nothing, chat, nothing, COUNTED, look=look)
        self.threads = threads
        self.router: Any = Mute() if lines is None else Scripted(chat, lines)

    def player(self, sampling: SamplingConfig, *, service: bool = False) -> Agent:
        limits = TrajectoryLimits(turn=10, response=10, length=1000, turns=2, env_timeout_s=60.0)
        return Agent(self.router, self.chat, self.environments, limits, EnvPool(self.threads))


def counted(uid: int, **extra: Any) -> Prompt:
    return Prompt(uid, [{"role": "user", "content": "hello"}], "counted", {"reward_spec": {}, "extra_info": extra})


def all_closed() -> bool:
    """Returns True once every environment made was closed exactly once; an abandoned thread closes its environment when
    the call returns."""
    end = time.monotonic() + 60
    while sorted(Counted.made) != sorted(Counted.closed) and time.monotonic() < end:
        time.sleep(0.01)
    return sorted(Counted.made) == sorted(Counted.closed)


@pytest.mark.parametrize("after", [0, 2, 6, 20, 40])
def test_whatever_was_opened_is_closed(characters_chat: Renderer, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Ends the run before any environment is open, while some are, and while all are and the engine generates."""
    monkeypatch.setattr(generator, "LOOK_EVERY_S", 0.01)
    Counted.made.clear()
    Counted.closed.clear()
    prompts = [counted(uid, opening_s=0.05) for uid in range(12)]
    with pytest.raises(Ending):
        asyncio.run(Played(characters_chat, after, threads=4)._generate(prompts, 1, SamplingConfig(), "0", None))
    assert all_closed()


def test_a_step_under_way_is_not_closed_over(characters_chat: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generator, "LOOK_EVERY_S", 0.05)
    Counted.made.clear()
    Counted.closed.clear()
    prompts = [counted(uid, step_s=2.0) for uid in range(6)]
    played = Played(characters_chat, 10, threads=4, lines=["a"] * 6)
    with pytest.raises(Ending):
        asyncio.run(played._generate(prompts, 1, SamplingConfig(), "0", None))
    assert len(Counted.made) == 6 and all_closed()


def test_what_fails_as_it_opens_is_closed(characters_chat: Renderer) -> None:
    Counted.made.clear()
    Counted.closed.clear()
    given = [counted(0, fails=True), counted(1, opening_s=4.0), counted(2)]
    played = play(characters_chat, COUNTED, [(p, Scripted(characters_chat, ["a"])) for p in given], env_timeout_s=1.5)
    assert [t.status for t in played] == [Status.ERROR_ENV, Status.ERROR_ENV_TIMEOUT, Status.COMPLETED]
    assert len(Counted.made) == 3 and all_closed()
