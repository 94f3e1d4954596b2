"""Requests may wait without limit; an engine without progress is limited.

Tests run a simulated vLLM with chosen cache and speed, behind the real engine actor, router and fleet, and a real vLLM.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skyrl_mega.cluster.calls import gather
from skyrl_mega.cluster.group import ActorGroup
from skyrl_mega.cluster.ray_session import session
from skyrl_mega.config.derived import CACHE_FILL
from skyrl_mega.config.schema import RolloutConfig
from skyrl_mega.engines.base import Completion, EngineDied, Facts, Request, Sampling
from skyrl_mega.engines.vllm.actor import VllmEngine
from skyrl_mega.engines.vllm.spec import EngineSpec, environment
from skyrl_mega.rollout.routing.router import IN_FLIGHT, QueuedRequest, Router
from tests.support.engines import build_model, complete, serving, spec_of, vllm_process
from tests.support.gloo import gloo_threads
from tests.support.simulated_engine import SimulatedEngine

LIMIT_S = 0.8
SLOW_S = 25.0
"""Allowance for the messages of a call on a busy machine, in seconds; an engine with an unresponsive actor gets 30 s
more."""
CACHE = 4
"""Sequences in the cache of a simulated engine."""


def spec(folder: Path) -> EngineSpec:
    (folder / "config.json").write_text("{}")
    return spec_of(folder, RolloutConfig(request_timeout_s=LIMIT_S))


def requests(count: int, tokens: int = 5) -> list[Request]:
    return [Request(f"r{i}", [1] * 5, tokens, seed=i) for i in range(count)]


@pytest.fixture(scope="module")
def ray() -> Iterator[None]:
    with session(actors=2):
        yield


def simulated(folder: Path, *faults: int | None, token_s: float) -> ActorGroup:
    arguments = [{"spec": spec(folder), "places": CACHE, "token_s": token_s, "stalls_after": fault} for fault in faults]
    group = ActorGroup.spawn("engine", SimulatedEngine, arguments, timeout=180, logs=folder / "logs")
    group.call_all("start", timeout=600)
    return group


def route(fleet: Any, asked: list[Request], concurrency: int = 16) -> dict[str, Completion]:
    async def all_of_them() -> list[Completion]:
        router = Router(fleet, Sampling(), concurrency, LIMIT_S)
        return list(await asyncio.gather(*(router.generate(request) for request in asked)))

    return {c.id: c for c in asyncio.run(all_of_them())}


def test_a_queue_of_ten_caches_and_slow_tokens_end_nothing(ray: None, tmp_path: Path) -> None:
    """Sends requests longer than the limit; the last ones wait ten times as long."""
    group = simulated(tmp_path, None, token_s=LIMIT_S / 4)
    try:
        start = time.monotonic()
        answers = route(serving(group), requests(10 * CACHE))
        assert time.monotonic() - start > 10 * LIMIT_S
        assert all(answer.finish == "length" and len(answer.tokens) == 5 for answer in answers.values())
        assert len(answers) == 10 * CACHE
    finally:
        group.shutdown()


@pytest.mark.parametrize("tokens", [0, 30])
def test_an_engine_that_stands_still_is_found_and_others_take_its_requests(
    ray: None, tmp_path: Path, tokens: int
) -> None:
    """Stalls an engine before the first token, or later with all remaining requests waiting."""
    group = simulated(tmp_path, tokens, None, token_s=0.02)
    timed_lines: list[tuple[float, str]] = []
    fleet = serving(group, restarts=1)
    fleet.say = lambda text: timed_lines.append((time.monotonic(), text))
    try:
        (tmp_path / "well").touch()
        start = time.monotonic()
        answers = route(fleet, requests(8 * CACHE))
        assert len(answers) == 8 * CACHE
        assert fleet.serving == [1]
        found_at, text = timed_lines[0]
        assert f"got a token for {LIMIT_S:g} s" in text
        assert found_at - start < 2 * LIMIT_S + SLOW_S
    finally:
        fleet.close()
        group.shutdown()


def test_a_pause_does_not_count_and_signs_of_life_come_meanwhile(tmp_path: Path) -> None:
    async def run() -> tuple[list[Completion], int]:
        engine = SimulatedEngine(spec(tmp_path), CACHE, token_s=0.02)
        await engine.start()
        ended: list[Completion] = []
        signs = 0

        async def weights() -> None:
            await asyncio.sleep(0.05)
            await engine.pause()
            await asyncio.sleep(3 * LIMIT_S)
            await engine.resume()

        update = asyncio.create_task(weights())
        async for some in engine.generate_many(requests(CACHE), Sampling()):
            ended += some
            signs += not some
        await update
        return ended, signs

    ended, signs = asyncio.run(run())
    assert len(ended) == CACHE
    assert signs >= 3


def test_time_in_which_the_engines_own_process_was_stopped_does_not_count(tmp_path: Path) -> None:
    async def run() -> list[Completion]:
        engine = SimulatedEngine(spec(tmp_path), CACHE, token_s=0.05)
        await engine.start()
        asyncio.get_running_loop().call_later(0.1, time.sleep, 2 * LIMIT_S)
        return [c async for some in engine.generate_many(requests(CACHE), Sampling()) for c in some]

    assert len(asyncio.run(run())) == CACHE


@pytest.mark.parametrize("known", [True, False])
def test_an_engine_is_given_what_its_cache_holds(ray: None, tmp_path: Path, known: bool) -> None:
    """Limits the requests in an engine to `CACHE` sequences of the full length of 10 tokens; then, with a state of 30
    tokens per sequence, to a quarter of these."""
    group = simulated(tmp_path, None, token_s=0.01)
    fleet = serving(group)
    if known:
        fleet.facts = group.call_all("start", timeout=60)
    try:
        assert len(route(fleet, requests(20 * CACHE), concurrency=8)) == 20 * CACHE
        [most] = group.call_all("most", timeout=60)
        assert most == (CACHE_FILL * CACHE if known else IN_FLIGHT * 8)
        long = Request("long", [1] * 500, 1, 0)  # fits no cache; may run alone
        assert len(route(fleet, [long, *requests(3)])) == 4
        if known:
            fleet.facts = [replace(facts, sequence_tokens=30) for facts in fleet.facts]
            router = Router(fleet, Sampling(), 8, LIMIT_S)
            waiting = QueuedRequest(requests(1)[0], asyncio.Future(loop=asyncio.new_event_loop()))
            [load] = router.load.values()
            while load.fits(waiting, 8):
                load.add(waiting)
            assert load.requests == CACHE_FILL * CACHE / 4
    finally:
        group.shutdown()


# ---- with a real engine ----------------------------------------------------------------------------------------------

REAL = RolloutConfig(kv_cache_gib=0.01, request_timeout_s=3.0, concurrency=256)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory, ray: None) -> Iterator[tuple[ActorGroup, Facts]]:
    """Starts an engine with a cache for 82 sequences of full length: two layers, two heads of 32 for keys and for
    values, in float32."""
    model = build_model(tmp_path_factory.mktemp("models") / "moe", "qwen3_moe", seed=3)
    spec = spec_of(model, REAL, weights="auto")
    group = ActorGroup.spawn(
        "real", VllmEngine, [{"spec": spec}], timeout=300, env=environment(spec), logs=model.parent
    )
    [facts] = group.call_all("start", timeout=600)
    yield group, facts
    group.shutdown()


def test_what_a_real_engine_says_of_its_cache(real: tuple[ActorGroup, Facts]) -> None:
    _, facts = real
    assert facts.cache_bytes == int(0.01 * 2**30)
    token = 2 * 2 * 2 * 32 * 4
    assert facts.cache_bytes // token * 0.97 < facts.cache_tokens <= facts.cache_bytes // token


def test_a_real_engine_with_a_queue_ends_nothing_by_time(real: tuple[ActorGroup, Facts]) -> None:
    """Measures the machine's speed, and sends a queue longer than the limit."""
    group, _ = real

    def answered(name: str, count: int) -> float:
        start = time.monotonic()
        asked = [Request(f"{name} {i}", [5, 30, 31], 120, seed=i) for i in range(count)]
        assert len(complete(group, asked)) == count
        return time.monotonic() - start

    answered("the first are slow", 100)
    seconds = answered("pace", 300)
    assert answered("queue", round(3 * REAL.request_timeout_s * 300 / seconds)) > REAL.request_timeout_s


def test_a_replica_that_hangs_is_found_while_another_gets_tokens(tmp_path: Path) -> None:
    replicas = {"data_parallel_size": 2}
    settings = RolloutConfig(request_timeout_s=LIMIT_S, options=replicas)
    (tmp_path / "config.json").write_text("{}")

    async def ask() -> None:
        engine = SimulatedEngine(spec_of(tmp_path, settings), places=CACHE, token_s=LIMIT_S / 20)
        await engine.start()
        simulated: Any = engine.llm
        simulated.hung_replica = 1
        async with asyncio.timeout(20 * LIMIT_S):
            asked = [Request(f"{i}/0", [i] * 5, 10_000, seed=i) for i in range(2)]
            async for _ in engine.generate_many(asked, Sampling()):
                pass

    with pytest.raises(EngineDied, match="replica 1 of vLLM stands still: none of its 1 requests got a token"):
        asyncio.run(ask())


def test_gloo_groups_of_a_real_engine_share_a_thread(real: tuple[ActorGroup, Facts]) -> None:
    """Counts the threads of vLLM's process that wait for messages of gloo: vLLM creates 16 groups."""
    assert gloo_threads(vllm_process(real[0], 0)) == 1


def test_a_real_engine_that_is_stopped_is_found(real: tuple[ActorGroup, Facts]) -> None:
    """Stops vLLM's process while the actor keeps answering. Ends the module's engine; must be the last test."""
    group, _ = real
    assert gather([group.submit(0, "health")], 60) == [0], "the engine outlives the tests before"
    core = vllm_process(group, 0)

    async def ask() -> float:
        method = group.actors[0].generate_many.options(num_returns="streaming")
        stream = method.remote([Request(f"stopped {i}", [5], 120, i) for i in range(500)], Sampling())
        await anext(stream)
        os.kill(core, signal.SIGSTOP)
        start = time.monotonic()
        async for reference in stream:
            await reference
        return time.monotonic() - start

    start = time.monotonic()
    with pytest.raises(Exception, match="stands still") as raised:
        asyncio.run(ask())
    assert isinstance(raised.value.cause, EngineDied)  # type: ignore[attr-defined]
    assert time.monotonic() - start < 2 * REAL.request_timeout_s + SLOW_S
    call = group.submit(0, "health")  # the actor still answers
    assert gather([call], 60) == [0]
