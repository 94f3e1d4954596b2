"""Slots for environments, and retried trajectories: in the driver's threads, without an engine."""

from __future__ import annotations

import asyncio
import itertools
import random
from array import array
from typing import Any, ClassVar

import pytest

from skyrl_mega.config.schema import EnvironmentConfig
from skyrl_mega.envs.base import BaseTextEnv
from skyrl_mega.envs.faults import InfrastructureFault
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.rollout.agent import agent_loop
from skyrl_mega.rollout.agent.agent_loop import Agent
from skyrl_mega.rollout.agent.env_pool import EnvPool
from skyrl_mega.rollout.agent.limits import TrajectoryLimits
from skyrl_mega.rollout.agent.renderer import Renderer
from skyrl_mega.rollout.gate import Start
from skyrl_mega.rollout.slots import SlotPlayer, Slots
from skyrl_mega.simulation.virtual_time import VirtualLoop
from skyrl_mega.trajectories.trajectory import Status, Trajectory
from tests.support.scripted import Scripted


class Timed:
    """A player of trajectories without content; records the most open at once in `most`, and the order in `begun`."""

    router: Any = None

    def __init__(self, seed: int = 0) -> None:
        self.random, self.open, self.most = random.Random(seed), 0, 0
        self.begun: list[str] = []

    async def play(self, prompt: Prompt, sample: int, name: str, start: Start | None = None) -> Trajectory:
        self.open += 1
        self.most = max(self.most, self.open)
        self.begun.append(name)
        try:
            await asyncio.sleep(self.random.uniform(1, 3))
        finally:
            self.open -= 1
        nothing: Any = array("i")
        return Trajectory(prompt, sample, nothing, nothing, nothing, 0, 1.0, Status.COMPLETED, 1)


PROMPT = Prompt(0, [], "", {})


def test_no_more_are_open_than_there_are_slots_and_who_waits_longest_is_next() -> None:
    player, slots = Timed(), Slots(8)
    agent = SlotPlayer(player, slots)

    async def phase() -> list[Trajectory]:
        return await asyncio.gather(*(agent.play(PROMPT, i, str(i)) for i in range(100)))

    with VirtualLoop() as loop:
        played = loop.run(phase())
    assert player.most == slots.use.read() == 8
    assert player.begun == [*map(str, range(100))]
    assert [t.sample for t in played] == [*range(100)]
    assert [t.seconds["slot"] > 0 for t in played] == [False] * 8 + [True] * 92
    assert slots.use.read() == 0, "since the last look"


def test_without_a_bound_all_are_open() -> None:
    player = Timed()
    agent = SlotPlayer(player, Slots(None))
    with VirtualLoop() as loop:
        loop.run(_all(agent, 100))
    assert player.most == 100


async def _all(agent: SlotPlayer, count: int) -> list[Trajectory]:
    return await asyncio.gather(*[agent.play(PROMPT, 0, str(i)) for i in range(count)])


@pytest.mark.parametrize("seed", range(20))
def test_cancelled_ones_give_their_slots_back(seed: int) -> None:
    """Cancels random trajectories: waiting, with a new slot, or playing."""
    chance, player, slots = random.Random(seed), Timed(seed), Slots(4)
    agent = SlotPlayer(player, slots)

    async def phase() -> None:
        tasks = [asyncio.create_task(agent.play(PROMPT, 0, str(i))) for i in range(60)]
        while left := [task for task in tasks if not task.done()]:
            chance.choice(left).cancel()
            await asyncio.sleep(chance.choice([0, 0, 0.5]))
        await asyncio.gather(*tasks, return_exceptions=True)
        assert not slots.taken and not slots.queues and slots.use.now == 0
        assert player.most <= 4
        await asyncio.wait_for(_all(agent, 20), 100)

    with VirtualLoop() as loop:
        loop.run(phase())


def test_an_evaluation_is_not_behind_all_that_is_ahead() -> None:
    """Starts an evaluation behind 400 rollouts: half of the slots serve the evaluation."""
    slots = Slots(4)
    rollouts, evaluation = Timed(1), Timed(2)

    async def both() -> float:
        ahead = asyncio.create_task(_all(SlotPlayer(rollouts, slots), 400))
        await asyncio.sleep(10)
        start = asyncio.get_running_loop().time()
        await _all(SlotPlayer(evaluation, slots), 20)
        took = asyncio.get_running_loop().time() - start
        ahead.cancel()
        await asyncio.gather(ahead, return_exceptions=True)
        return took

    with VirtualLoop() as loop:
        assert loop.run(both()) < 30, "400 of them take 200 s"
    assert evaluation.most >= 2


class Flaky(BaseTextEnv):
    """An environment on a service failing the first `extra_info.fails` calls in `at`."""

    asked: ClassVar[dict[int, int]] = {}
    open: ClassVar[set[int]] = set()

    def ask(self, where: str) -> None:
        info = self.extras["extra_info"]
        if where == info["at"]:
            key = info["key"]
            self.asked[key] = self.asked.get(key, 0) + 1
            if self.asked[key] <= info["fails"]:
                kind = InfrastructureFault if info.get("kind", "service") == "service" else RuntimeError
                raise kind("no connection")

    def init(self, prompt: list[dict[str, Any]]) -> Any:
        self.open.add(id(self))
        self.ask("init")
        return prompt, {}

    def step(self, action: str) -> Any:
        self.turns += 1
        if self.turns == 2:
            self.ask("score")
        talk = [{"role": "user", "content": "go on"}]
        return {"observations": talk, "reward": 1.0, "done": self.turns == 2, "metadata": {}}

    def close(self) -> None:
        self.open.discard(id(self))


KEYS = itertools.count()


def play_flaky(chat: Renderer, retries: int, **info: Any) -> tuple[Trajectory, Scripted, int]:
    """Plays once; returns the trajectory, the policy, and the number of calls to the service."""
    key = next(KEYS)
    row = {"reward_spec": {"ground_truth": "1"}, "extra_info": {"key": key, **info}}
    prompt = Prompt(0, [{"role": "user", "content": "hello"}], "flaky", row)
    environments = EnvironmentConfig(classes={"flaky": "tests.rollout.test_slots:Flaky"})
    policy: Any = Scripted(chat, ["one", "two"] * 10)
    limits = TrajectoryLimits(turn=100, response=1000, length=1000, turns=4, env_timeout_s=60.0)

    async def one() -> Trajectory:
        return await Agent(policy, chat, environments, limits, EnvPool(2), retries=retries).play(prompt, 0, "0/1")

    from tests.rollout.test_slots import Flaky as Imported  # the class as imported by the registry

    played = asyncio.run(one())
    assert not Imported.open, "closed, whatever happened"
    return played, policy, Imported.asked.get(key, 0)


@pytest.mark.parametrize("at", ["init", "score"])
def test_a_fault_of_the_infrastructure_is_played_again(
    characters_chat: Renderer, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """Retries the same trajectory under the same names, instead of a reward of 0."""
    monkeypatch.setattr(agent_loop, "PAUSE_S", 0.001)
    whole, _, _ = play_flaky(characters_chat, 2, at="nowhere", fails=0)
    played, policy, asked = play_flaky(characters_chat, 2, at=at, fails=2)
    assert (played.status, played.reward, played.turns, played.retries, asked) == (Status.COMPLETED, 2.0, 2, 2, 3)
    assert (played.tokens, played.mask, played.messages) == (whole.tokens, whole.mask, whole.messages)
    names = [request.id for request, _ in policy.turns]
    assert names == ["0/1/0", "0/1/1"] * (3 if at == "score" else 1)


@pytest.mark.parametrize("at", ["init", "score"])
def test_one_that_fails_too_often_is_failed(
    characters_chat: Renderer, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    monkeypatch.setattr(agent_loop, "PAUSE_S", 0.001)
    played, _, asked = play_flaky(characters_chat, 2, at=at, fails=99)
    assert (played.status, played.retries, asked) == (Status.ERROR_INFRASTRUCTURE, 2, 3)
    assert played.status.failed and played.reward == 0.0 and "no connection" in played.metadata["error"]


@pytest.mark.parametrize("at", ["init", "score"])
def test_an_error_of_the_environment_is_never_played_again(characters_chat: Renderer, at: str) -> None:
    played, _, asked = play_flaky(characters_chat, 2, at=at, fails=1, kind="own")
    assert (played.status, played.retries, asked) == (Status.ERROR_ENV, 0, 1)
