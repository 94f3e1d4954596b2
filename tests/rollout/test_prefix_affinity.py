"""Prefix affinity: turns return to the engine with the cached beginning, unless the engine is too busy."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_mega.engines import prefix_affinity
from skyrl_mega.engines.base import Request, Sampling
from skyrl_mega.engines.prefix_affinity import FEW, LONG_PROMPT, SHARE, PrefixAffinity
from skyrl_mega.engines.vllm.replicas import Replicas
from skyrl_mega.rollout.routing.router import QueuedRequest, Router
from skyrl_mega.simulation.virtual_time import VirtualLoop
from tests.support.virtual_rollouts import Engines


def turn(name: str, length: int = 10, prompt: int | None = None) -> Request:
    return Request(name, range(length), 5, 0, prompt=prompt)


def test_a_turn_goes_back_to_the_engine_of_the_one_before() -> None:
    known = PrefixAffinity()
    assert known.choose(turn("a/0"), {0: 3, 1: 2}) == 1
    assert known.choose(turn("a/1"), {0: 1, 1: 2}) == 1
    assert known.choose(turn("b/0"), {0: 1, 1: 2}) == 0


def test_not_where_that_one_is_too_busy_or_gone() -> None:
    known = PrefixAffinity()
    known.choose(turn("a/0"), {0: 0, 1: 1})
    assert known.choose(turn("a/1"), {0: 100 + 25, 1: 100}) == 0
    assert known.choose(turn("a/2"), {0: 100 + 26, 1: 100}) == 1
    assert known.choose(turn("a/3"), {0: 0, 1: FEW}) == 1
    assert known.choose(turn("a/4"), {0: 0}) == 0


def test_samples_of_a_long_prompt_go_together() -> None:
    known = PrefixAffinity()
    assert known.choose(turn("a/0", LONG_PROMPT, prompt=7), {0: 3, 1: 2}) == 1
    assert known.choose(turn("b/0", LONG_PROMPT, prompt=7), {0: 3, 1: 4}) == 1
    assert known.choose(turn("c/0", LONG_PROMPT, prompt=8), {0: 3, 1: 4}) == 0
    assert known.choose(turn("d/0", LONG_PROMPT - 1, prompt=9), {0: 3, 1: 4}) == 0
    assert known.choose(turn("e/0", LONG_PROMPT - 1, prompt=9), {0: 5, 1: 4}) == 1


def test_what_is_longest_unused_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_affinity, "MOST_REMEMBERED", 2)
    known = PrefixAffinity()
    for name in ("a/0", "b/0", "a/1", "c/0"):
        known.choose(turn(name), {0: 0, 1: 1})
    assert list(known.engines) == ["a", "c"]


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 4), st.integers(0, 3)), max_size=300))
def test_no_engine_is_given_much_more_than_another(turns: list[tuple[int, int, int]]) -> None:
    """Bounds the load of every engine for random turns and endings."""
    known, requests = PrefixAffinity(), dict.fromkeys(range(4), 0)
    for number, (trajectory, prompt, ended) in enumerate(turns):
        least = min(requests.values())
        chosen = known.choose(turn(f"{trajectory}/{number}", LONG_PROMPT, prompt), requests)
        assert requests[chosen] <= least + max(FEW, SHARE * least)
        requests[chosen] += 1
        requests[ended] = max(0, requests[ended] - 1)


def test_a_router_sends_all_turns_of_a_trajectory_to_one_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sends all turns of a trajectory, and all samples of a long prompt, to the same engine, in any order of
    answers."""
    went: dict[str, set[int]] = defaultdict(set)
    send = Router._send

    def told(self: Router, parts: dict[int, dict[str, QueuedRequest]]) -> None:
        for engine, part in parts.items():
            for waiting in part.values():
                went[waiting.request.trajectory].add(engine)
        send(self, parts)

    monkeypatch.setattr(Router, "_send", told)
    random = Random(0)
    with VirtualLoop() as loop:
        engines: Any = Engines(3, random)
        engines.revive(0)
        router = Router(engines, Sampling(), 4, 600.0, service=True)

        async def play(name: str, prompt: int) -> None:
            for turn_of in range(4):
                begins = None if turn_of else prompt
                await router.generate(Request(f"{name}/{turn_of}@mark", [1] * LONG_PROMPT, 6, turn_of, prompt=begins))
                await asyncio.sleep(random.random())

        async def everything() -> None:
            await asyncio.gather(*(play(f"{prompt}-{sample}", prompt) for prompt in range(3) for sample in range(3)))

        loop.run(everything())
    assert len(went) == 9 and all(len(engines) == 1 for engines in went.values())
    homes_of = [{engine for sample in range(3) for engine in went[f"{prompt}-{sample}"]} for prompt in range(3)]
    assert sorted(homes_of, key=min) == [{0}, {1}, {2}]


def test_the_replicas_of_an_engine_share_requests_in_order() -> None:
    replicas = Replicas(2)
    requests = [Request(f"{n}/0", [1, 2], 1, 0) for n in range(6)]
    first = [*map(replicas.take, requests)]
    assert first == [0, 1] * 3
    replicas.release(requests[1], 1, 5)
    assert replicas.take(Request("6/0", [1, 2], 1, 0)) == 1
    # The next turn of a trajectory goes to the replica with the cached prefix.
    replicas.release(requests[0], first[0], 7)
    assert replicas.take(Request("0/1", [1, 2, 3], 1, 0)) == 0
    assert replicas.requests == {0: 3, 1: 3}
    assert replicas.tokens([("3/0", 10), ("0/0", 1000), ("4/0", 2)]) == {0: 9, 1: 15}, "0/0 has ended"
    again = Request("2/0", [1, 2], 1, 1)
    replicas.take(again)
    replicas.release(requests[2], 0, 0)
    assert replicas.of["2/0"][0] is again, "the name is in use again"
