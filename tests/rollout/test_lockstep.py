"""Requests in waves: batches in the engines do not depend on the environments' timing.

A fake engine records the batches, in virtual time. A test with real engines compares bits.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skyrl_mega.cluster.errors import ActorFailed
from skyrl_mega.cluster.ray_session import session
from skyrl_mega.config.schema import EnvironmentConfig, RolloutConfig, SamplingConfig
from skyrl_mega.engines.base import Completion, Request, Sampling
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.rollout.agent.renderer import Renderer
from skyrl_mega.rollout.generator import Generator
from skyrl_mega.rollout.routing.lockstep import FixedEngines, in_lockstep
from skyrl_mega.rollout.routing.router import Router
from tests.support.engines import build_model, serving, spec_of, start_engine
from tests.support.simulated_time import run
from tests.trainer.chance import STOP

PLAYERS, TURNS = 24, 4


class FakeEngine:
    """An engine with random delays per request; `calls` records each batch of requests."""

    def __init__(self, clock: random.Random, dies_at: int | None = None) -> None:
        self.clock, self.calls, self.dies_at = clock, list[list[str]](), dies_at
        self.generate_many = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self.stream))

    async def stream(self, requests: list[Request], _: Sampling) -> AsyncIterator[Any]:
        self.calls.append([request.id for request in requests])
        for request in sorted(requests, key=lambda _: self.clock.random()):
            await asyncio.sleep(self.clock.random())
            if len(self.calls) == self.dies_at:
                raise TimeoutError
            yield self.answer(request)

    async def answer(self, request: Request) -> list[Completion]:
        return [Completion(request.id, [1], [0.0], "stop", ())]


def fleet_of(*engines: FakeEngine) -> Any:
    """Returns a minimal fleet for a router; `check` raises when no engine is left."""
    left = set(range(len(engines)))

    def check() -> None:
        if not left:
            raise ActorFailed("engine", 0, "generate_many", "nobody is left")

    return SimpleNamespace(
        group=SimpleNamespace(actors=list(engines), name="engine"),
        serving=sorted(left),
        facts=dict.fromkeys(left),
        retire=lambda engine, error: left.discard(engine),
        check=check,
    )


def batches(lockstep: bool, clock: int, dies_at: int | None = None) -> list[list[list[str]]]:
    """Returns the batches of two engines, message by message, for trajectories of 1 to 4 turns.

    The number of turns is fixed; the delays of environments and engines come from `clock`.
    """
    rng = random.Random(clock)
    engines = [FakeEngine(rng, dies_at), FakeEngine(rng)]

    async def play(router: Router, place: int) -> None:
        try:
            for turn in range(1 + place * 7 % TURNS):
                await router.generate(Request(f"s/{place}/{turn}", [1, 2], 3, seed=0))
                await asyncio.sleep(rng.random() * 5)
        finally:
            router.leave()

    async def phase() -> None:
        router = Router(fleet_of(*engines), Sampling(), 16, 600.0)
        if lockstep:
            strategies = {"pick_engine": FixedEngines().choose, "when_to_dispatch": in_lockstep}
            router = Router(fleet_of(*engines), Sampling(), None, 600.0, **strategies)  # type: ignore[arg-type]
        router.expect(PLAYERS)
        await asyncio.gather(*(play(router, place) for place in range(PLAYERS)))

    run(phase())
    return [engine.calls for engine in engines]


def test_waves_are_the_same_whatever_the_clock() -> None:
    first = batches(True, clock=0)
    assert all(batches(True, clock) == first for clock in range(1, 6))
    assert [len(calls) for calls in first] == [TURNS, TURNS], "a message to each engine for every turn"
    homes = [{name.split("/")[1] for call in calls for name in call} for calls in first]
    assert not homes[0] & homes[1], "a trajectory stays with the engine that has its cached prefix"
    assert sorted(len(home) for home in homes) == [PLAYERS // 2, PLAYERS // 2]


def test_without_waves_the_clock_decides() -> None:
    assert batches(False, clock=0) != batches(False, clock=1)


def test_an_engine_that_dies_leaves_its_part_to_the_other() -> None:
    first, second = batches(True, clock=3, dies_at=2)
    assert len(first) == 2
    last_turns = {f"s/{place}/{place * 7 % TURNS}" for place in range(PLAYERS)}
    assert last_turns <= {name for call in first + second for name in call}


CHANCE = EnvironmentConfig(classes={"chance": "tests.trainer.chance:Chance"})
ROLLOUT = RolloutConfig(
    kv_cache_gib=0.1,
    max_prompt_tokens=40,
    max_length=120,
    max_turns=3,
    max_response_tokens=80,
    concurrency=64,
    sampling=SamplingConfig(max_tokens=20, stop=STOP),
)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("engines", "tensor"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.nightly)])
def test_several_turns_repeat_to_the_last_bit(tmp_path: Path, engines: int, tensor: int) -> None:
    """Plays on two engines, and on an engine of two workers, with environments of random delay."""
    model = build_model(tmp_path / "moe", "qwen3_moe", seed=3)
    rollout = replace(ROLLOUT, tensor=tensor)
    extra: dict[str, Any] = {"reward_spec": {}, "extra_info": {}}
    prompts = [Prompt(i, [{"role": "user", "content": f"{i} * 3 = "}], "chance", extra) for i in range(24)]
    with session(actors=engines * tensor):
        group = start_engine("engine", spec_of(model, rollout, weights="auto"), tmp_path, engines=engines)
        chat, played = Renderer(str(model)), []
        for _ in range(3):
            with Generator(serving(group), chat, rollout, CHANCE, lockstep=True) as generator:
                groups = generator.generate(prompts, 4, rollout.sampling, seed="0/1")
            played.append([(t.tokens, t.logprobs, t.reward, t.turns) for of in groups for t in of.trajectories])
        group.shutdown()
    assert sum(turns for *_, turns in played[0]) > 150, "there are several turns"
    assert played[1] == played[0] and played[2] == played[0]
