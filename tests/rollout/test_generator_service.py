"""Groups of a generator in a service: engines crash and get new weights, and an interrupted run resumes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from skyrl_mega.config.schema import EnvironmentConfig, RolloutConfig
from skyrl_mega.engines.base import Completion, Request, Sampling
from skyrl_mega.rollout import journal
from skyrl_mega.rollout.agent.renderer import Renderer
from skyrl_mega.rollout.generators import Branch, GeneratorService, GroupRequest, TrajectoryGenerator, load
from skyrl_mega.rollout.generators.group_player import GroupPlayer
from skyrl_mega.rollout.generators.group_state import GeneratorFault
from skyrl_mega.rollout.routing.router import Router
from skyrl_mega.rollout.service import Done, RolloutService, Ticket
from skyrl_mega.simulation.virtual_time import VirtualLoop
from tests.support.generators import RandomPolicy, agent_of, prompt_of
from tests.support.virtual_rollouts import Engines

INLINE = EnvironmentConfig(classes={"trial": "skyrl_mega.rollout.generators.trial:TrialEnv"})
GROUPS = [prompt_of(i, "trial", f"question {i}") for i in range(12)]


class Asked(Router):
    """A router that notes the requests sent to engines."""

    asked: list[str]

    async def _answer(self, request: Request) -> Completion:
        self.asked.append(request.id)
        return await super()._answer(request)


def service_of(chat: Renderer, engines: Any, loop: VirtualLoop) -> tuple[RolloutService, Asked]:
    router = Asked(engines, Sampling(), 4, 600.0, service=True)
    router.asked = []
    generator = load.create(RolloutConfig(generator="tree_search", generator_options={"depth": 2, "tokens": 2}))
    assert generator is not None
    player = GroupPlayer(agent_of(chat, router, INLINE, turns=1), generator)
    return RolloutService(player, engines, loop, timeout_s=60.0, own=True), router


def tickets(recorded: dict[str, Any]) -> list[Ticket]:
    names = [tuple(f"0/1/{i * 4 + s}" for s in range(4)) for i in range(len(GROUPS))]
    turns = [[turn for name in given for turn in recorded.get(name, ())] for given in names]
    return [Ticket(i, i, 0, given, recorded=turns[i]) for i, given in enumerate(names)]


def tokens_of(done: Sequence[Done]) -> dict[int, list[list[int]]]:
    return {one.ticket.number: [t.tokens.tolist() for t in one.group.trajectories] for one in done}


@pytest.mark.parametrize("seed", range(3))
def test_crashes_syncs_and_a_resume_lose_and_double_nothing(
    characters_chat: Renderer, tmp_path: Path, seed: int
) -> None:
    random, every = Random(seed), []
    recorded: dict[str, Any] = {}
    for interrupted in (True, False):
        engines, version = Engines(3, random), 0
        engines.revive(0)
        with VirtualLoop() as loop:
            service, router = service_of(characters_chat, engines, loop)
            wanted = tickets(recorded)
            service.submit(wanted[:6], GROUPS[:6])
            service.submit(wanted[6:], GROUPS[6:])
            done: list[Done] = []
            while len(done) < (4 if interrupted else len(GROUPS)):
                done += service.done(random.uniform(0.5, 3.0))
                if random.random() < 0.3:
                    engines.kill(random.randrange(3))
                version += 1
                engines.revive(version)
                service.engines_changed()
            if interrupted:
                service.write_turns(tmp_path)
                recorded = journal.read_all(tmp_path)
                assert recorded and all(name.startswith("0/1/") for name in recorded)
            else:
                kept = {turn.request for turns in recorded.values() for turn in turns}
                assert kept and not kept & {*router.asked}, "recorded answers are not asked for again"
                assert not router.journal.all(), "finished groups leave no turns"
        every.append(done)
        for one in done:
            assert [t.sample for t in one.group.trajectories] == [0, 1, 2, 3]
            assert all(t.versions and not t.status.failed for t in one.group.trajectories)
    first, second = map(tokens_of, every)
    assert sorted(second) == list(range(len(GROUPS)))
    assert all(second[number] == tokens for number, tokens in first.items()), "the same random streams"


def test_a_completion_of_no_tokens_is_refused(characters_chat: Renderer) -> None:
    class Nothing(TrajectoryGenerator):
        async def generate(self, group: GroupRequest, service: GeneratorService) -> list[Branch]:
            for most in (0, -1):
                with pytest.raises(GeneratorFault, match=f"1 tokens, and {most} to sample; allowed are"):
                    await service.sample([1], max_tokens=most)
            answers = [await (await service.open(i)).sample() for i in range(group.samples)]
            return [await answer.step() for answer in answers]

    with VirtualLoop() as loop:
        player = GroupPlayer(agent_of(characters_chat, RandomPolicy(characters_chat), INLINE, turns=1), Nothing({}))
        played = loop.run(player.play_group(GROUPS[0], ["0/1/0", "0/1/1"]))
    assert not any(trajectory.status.failed for trajectory in played)


def test_a_generator_that_cancels_a_sample_fails_its_group_only(characters_chat: Renderer) -> None:
    class Cancelling(TrajectoryGenerator):
        async def generate(self, group: GroupRequest, service: GeneratorService) -> list[Branch]:
            root = await service.open()
            if group.names[0] == "0/1/0":
                samples = [asyncio.create_task(root.sample()) for _ in range(2)]
                samples[0].cancel()
                await asyncio.gather(*samples)
            answers = [await root.sample() for _ in range(group.samples)]
            return [await answer.step() for answer in answers]

    engines: Any = Engines(2, Random(0))
    engines.revive(0)
    with VirtualLoop() as loop:
        router = Router(engines, Sampling(), 4, 600.0, service=True)
        player = GroupPlayer(agent_of(characters_chat, router, INLINE, turns=1), Cancelling({}))
        service = RolloutService(player, engines, loop, timeout_s=60.0, own=True)
        service.submit(tickets({})[:2], GROUPS[:2])
        done: list[Done] = []
        while len(done) < 2:
            done += service.done(5.0)
    failed = {one.ticket.number: {t.status.failed for t in one.group.trajectories} for one in done}
    assert failed == {0: {True}, 1: {False}}
