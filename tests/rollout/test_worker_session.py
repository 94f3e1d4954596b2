"""A session of a worker, without Ray: calls overtake each other."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skyrl_mega.config.schema import EnvironmentConfig, RolloutConfig
from skyrl_mega.engines.base import Sampling
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.rollout.agent.agent_loop import Agent
from skyrl_mega.rollout.agent.env_pool import EnvPool
from skyrl_mega.rollout.agent.limits import TrajectoryLimits
from skyrl_mega.rollout.agent.renderer import Renderer
from skyrl_mega.rollout.generators import Branch, GeneratorService, GroupRequest, TrajectoryGenerator
from skyrl_mega.rollout.journal import Journal
from skyrl_mega.rollout.routing.router import Router
from skyrl_mega.rollout.workers import worker
from skyrl_mega.rollout.workers.messages import Cancelled, EngineView, TrajectoryJob
from skyrl_mega.rollout.workers.worker import KnownEngines, PhaseSession
from skyrl_mega.trajectories.trajectory import Status
from tests.support.chats import characters
from tests.support.generators import Independent, RandomPolicy, agent_of, prompt_of


class Waits:
    """An agent with trajectories of 60 s."""

    def __init__(self) -> None:
        self.router = SimpleNamespace(close=lambda: None, journal=Journal())
        self.opened: list[int] = []

    async def play(self, prompt: Prompt, sample: int, name: str) -> Any:
        self.opened.append(sample)
        await asyncio.sleep(60)


def order(key: int) -> TrajectoryJob:
    return TrajectoryJob(key, Prompt(0, [], "", {}), key, str(key), False)


def test_an_order_that_was_abandoned_before_it_came_is_not_played() -> None:
    agent = Waits()
    equipment: Any = SimpleNamespace(agent=lambda *_, **__: agent)
    sampling: Any = None

    async def everything() -> list[Any]:
        session = PhaseSession(equipment, sampling, False, EngineView("engine", [], [], [], 0))
        session.abandon(7)
        session.play(order(7))
        session.play(order(3))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        session.abandon(3)
        session.abandon(3)
        await session.close()
        return await session.events()

    assert asyncio.run(everything()) == [Cancelled(7), Cancelled(3)]
    assert agent.opened == [3]


def test_what_is_said_of_engines_before_the_newest_sync_is_old() -> None:
    def now(serving: list[int], syncs: int) -> EngineView:
        return EngineView("engine", ["a", "b"], [None, None], serving, syncs)

    def agent(engines: KnownEngines, _: Any, *, service: bool, mark: str) -> Any:
        return SimpleNamespace(router=Router(engines, Sampling(), 4, 10.0, service=service, mark=mark))

    equipment: Any = SimpleNamespace(agent=agent)
    sampling: Any = None

    async def everything() -> list[tuple[list[int], int]]:
        session = PhaseSession(equipment, sampling, True, now([0, 1], 3))
        known = []
        for serving, syncs in (([0], 2), ([0], 3), ([1], 4), ([0, 1], 3)):
            session.rejoin(now(serving, syncs))
            known.append((session.engines.serving, session.engines.syncs))
        await session.close()
        return known

    assert asyncio.run(everything()) == [([0, 1], 3), ([0], 3), ([1], 4), ([1], 4)]


def test_an_order_that_has_failed_is_not_played_and_has_its_prompt(characters_chat: Renderer) -> None:
    """Fails the job without opening the environment, as opening may crash the process."""
    limits = TrajectoryLimits(100, 1000, 1000, turns=4, env_timeout_s=60.0)
    prompt = Prompt(0, [{"role": "user", "content": "hello"}], "no such class", {"reward_spec": {}})
    router: Any = SimpleNamespace(close=lambda: None, journal=Journal())
    agent = Agent(router, characters_chat, EnvironmentConfig(), limits, EnvPool(1))
    equipment: Any = SimpleNamespace(agent=lambda *_, **__: agent)
    sampling: Any = None

    async def everything() -> tuple[list[Any], Any]:
        session = PhaseSession(equipment, sampling, False, EngineView("engine", [], [], [], 0))
        session.play(TrajectoryJob(3, prompt, 1, "0/1", False, fault="4 processes died with it"))
        news = await session.events()
        return news, session.hand_over(3)

    [played], arrays = asyncio.run(everything())
    t = played.trajectory
    assert (t.status, t.reward, t.turns, t.sample) == (Status.ERROR_INFRASTRUCTURE, 0.0, 0, 1)
    assert t.metadata == {"error": "4 processes died with it"}
    tokens = arrays.tokens.tokens.tolist()
    assert tokens == list(agent.first(prompt.messages)) and t.prompt_length == t.length == len(tokens) > 0


def test_a_prompt_that_the_template_refuses_has_failed_and_ends_no_run(tmp_path: Path) -> None:
    """Fails a trajectory without playing, and a trajectory with a failing environment, under a template refusing the
    prompt."""
    chat = characters(tmp_path / "refuses", "{{ raise_exception('no') }}")
    limits = TrajectoryLimits(100, 1000, 1000, turns=4, env_timeout_s=60.0)
    router: Any = SimpleNamespace()
    agent = Agent(router, chat, EnvironmentConfig(), limits, EnvPool(1))
    prompt = Prompt(0, [{"role": "user", "content": "hello"}], "no such class", {})
    for t in (agent.failed_trajectory(prompt, 1, "died"), asyncio.run(agent.play(prompt, 1, "1"))):
        assert t.status.failed and t.messages == prompt.messages
        assert t.prompt_length == len(t.tokens) == 1


def test_a_worker_imports_environments_before_it_is_given_trajectories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Imports the classes at start; otherwise the import would count as time of the first trajectories."""
    monkeypatch.setattr(worker, "Renderer", lambda *_: None)
    file = tmp_path / "own.py"
    file.write_text(
        "from pathlib import Path\nfrom skyrl_mega.envs import BaseTextEnv\nPath(__file__).with_name('is').touch()\n"
        "class Own(BaseTextEnv):\n    def step(self, action):\n        pass\n"
    )
    environments = EnvironmentConfig(classes={"own": f"{file}:Own"})
    worker.RolloutWorker(
        model="", rollout=RolloutConfig(), environments=environments, reward_weights={}, secrets={}, workers_on_node=1
    )
    assert (tmp_path / "is").exists()


@pytest.mark.parametrize("fault", ["", "3 processes died with it"])
def test_a_group_is_reported_trajectory_by_trajectory(characters_chat: Renderer, fault: str) -> None:
    agent = agent_of(characters_chat, RandomPolicy(characters_chat))
    agent.router.journal = Journal()
    equipment: Any = SimpleNamespace(agent=lambda *_, **__: agent)
    sampling: Any = None
    names = ("0/1/0", "0/1/1", "0/1/2")

    async def everything() -> tuple[list[Any], list[Any]]:
        session = PhaseSession(equipment, sampling, False, EngineView("engine", [], [], [], 0), Independent({}))
        session.play(TrajectoryJob(5, prompt_of(), 0, names[0], False, fault=fault, names=names))
        events: list[Any] = []
        while len(events) < 3:
            events += await session.events()
        return events, [session.hand_over(key) for key in (5, 6, 7)]

    events, arrays = asyncio.run(everything())
    assert [(event.key, event.trajectory.sample) for event in events] == [(5, 0), (6, 1), (7, 2)]
    assert [event.trajectory.status.failed for event in events] == [bool(fault)] * 3
    assert len({tuple(array.tokens.tokens.tolist()) for array in arrays}) == (1 if fault else 3)


def test_a_generator_that_cancels_a_sample_fails_its_group_and_an_abandoned_group_is_cancelled(
    characters_chat: Renderer,
) -> None:
    class Cancelling(TrajectoryGenerator):
        async def generate(self, group: GroupRequest, service: GeneratorService) -> list[Branch]:
            sample = asyncio.create_task((await service.open()).sample())
            sample.cancel()
            await sample
            return []

    class Waiting(TrajectoryGenerator):
        async def generate(self, group: GroupRequest, service: GeneratorService) -> list[Branch]:
            await asyncio.sleep(60)
            return []

    agent = agent_of(characters_chat, RandomPolicy(characters_chat))
    agent.router.journal = Journal()
    agent.router.close = lambda: None  # type: ignore[method-assign]
    equipment: Any = SimpleNamespace(agent=lambda *_, **__: agent)
    sampling: Any = None
    names = ("0/1/0", "0/1/1")

    async def events_of(generator: TrajectoryGenerator, *, abandoned: bool) -> list[Any]:
        session = PhaseSession(equipment, sampling, False, EngineView("engine", [], [], [], 0), generator)
        session.play(TrajectoryJob(5, prompt_of(), 0, names[0], False, names=names))
        if abandoned:
            await asyncio.sleep(0.01)
            session.abandon(5)
        events: list[Any] = []
        while len(events) < 2:
            events += await session.events()
        await session.close()
        return events

    failed = asyncio.run(events_of(Cancelling({}), abandoned=False))
    assert [(event.key, event.trajectory.status) for event in failed] == [(5, Status.ERROR_ENV), (6, Status.ERROR_ENV)]
    assert asyncio.run(events_of(Waiting({}), abandoned=True)) == [Cancelled(5), Cancelled(6)]
