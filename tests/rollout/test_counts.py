"""Activity counts of a router and of a pool of environments, compared with the actual activity."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from random import Random
from typing import Any

import pytest

from skyrl_mega.engines.base import Request, Sampling
from skyrl_mega.rollout.agent.env_pool import Abandoned, Call, EnvPool, Raised
from skyrl_mega.rollout.routing.router import Router
from skyrl_mega.simulation.virtual_time import VirtualLoop
from skyrl_mega.telemetry.timeline import Timeline
from tests.support.machine import within
from tests.support.virtual_rollouts import Engines


def under_way(engines: Engines) -> list[int]:
    """Returns the number of requests computed now, per engine."""
    return [sum(not task.done() for task in engine.calls) for engine in engines.engines]


async def play(engines: Engines, router: Router, counts: Counter[int], random: Random) -> int:
    """Sends ninety requests to three engines, some of which crash; returns the number of comparisons during
    activity."""
    looked = 0

    async def look() -> None:
        nonlocal looked
        while True:
            await asyncio.sleep(0.37)  # a moment between all other events
            assert [counts[e] for e in range(3)] == under_way(engines)
            looked += any(counts.values())

    async def ask(i: int) -> None:
        await asyncio.sleep(random.choice([0, 0, 5, 20]))
        await router.generate(Request(f"r{i}", [1, 2], 6, random.getrandbits(30)))

    async def trouble() -> None:
        await asyncio.sleep(4.1)
        engines.kill(1)
        await asyncio.sleep(7.1)
        if router.service:
            engines.hold(half=True)
            await asyncio.sleep(2.1)
            engines.revive(1)
            router.rejoin()

    looking = asyncio.create_task(look())
    asked = asyncio.gather(*(ask(i) for i in range(90)), trouble())
    await asyncio.wait([looking, asked], return_when="FIRST_COMPLETED")
    if not asked.done():
        looking.result()
    await asked
    looking.cancel()
    return looked


@pytest.mark.parametrize("service", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_an_engine_has_what_a_router_says(service: bool, seed: int) -> None:
    counts: Counter[int] = Counter()
    random = Random(seed)
    with VirtualLoop() as loop:
        engines = Engines(3, random)
        engines.revive(0)
        router = Router(engines, Sampling(), 4, 600.0, service=service)
        router.count = lambda engine, change: counts.update({engine: change})
        looked = loop.run(play(engines, router, counts, random))
    assert looked > 20 and not any(counts.values())


def test_what_is_abandoned_is_under_way_no_longer() -> None:
    counts: Counter[int] = Counter()

    async def leave(router: Router) -> None:
        asked = [asyncio.create_task(router.generate(Request(f"r{i}", [1], 6, i))) for i in range(8)]
        await asyncio.sleep(0.1)
        assert counts[0] == 8
        router.close()
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)

    with VirtualLoop() as loop:
        engines = Engines(1, Random(0))
        engines.revive(0)
        router = Router(engines, Sampling(), 4, 600.0)
        router.count = lambda engine, change: counts.update({engine: change})
        loop.run(leave(router))
    assert counts[0] == 0


def test_a_pool_tells_of_calls_that_have_a_place() -> None:
    """Counts running calls however they end; waiting calls and calls given up are not counted."""
    lock, running, most, late = threading.Lock(), 0, 0, threading.Event()
    counts: list[int] = []

    def count(change: int) -> None:
        counts.append((counts[-1] if counts else 0) + change)

    def work(fails: bool) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.02)
        with lock:
            running -= 1
        if fails:
            raise ValueError

    async def everything() -> list[Any]:
        pool = EnvPool(3, count)
        calls = [pool.run(Call(work, i % 2 == 0), 60) for i in range(12)]
        return await asyncio.gather(pool.run(Call(late.wait, 60), 0.05), *calls, return_exceptions=True)

    outcomes = asyncio.run(everything())
    late.set()
    assert [type(o) for o in outcomes[:3]] == [Abandoned, Raised, type(None)]
    assert counts[-1] == 0 and max(counts) == 3 and min(counts) == 0 and most <= 3


def test_a_request_and_a_call_cost_microseconds() -> None:
    """Measures the driver's CPU time per count, small against 100 µs for the request itself; the bound allows a busy
    machine ten times the usual cost."""
    timeline = Timeline()
    start = time.process_time()
    for _ in range(10_000):
        timeline.requests(0, 1)
        timeline.requests(0, -1)
        timeline.calls(1)
        timeline.calls(-1)
    assert within((time.process_time() - start) / 10_000, 50e-6)
