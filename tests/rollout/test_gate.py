"""Tests of the gate through which the trajectories of a batch begin."""

from __future__ import annotations

import asyncio
import random

import pytest

from skyrl_mega.rollout.gate import Gate


@pytest.mark.parametrize("seed", range(5))
def test_trajectories_begin_in_their_order_whenever_their_environments_opened(seed: int) -> None:
    began: list[int] = []

    async def play(gate: Gate, place: int, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        await gate.starts[place]()
        began.append(place)

    async def batch() -> None:
        gate, delays = Gate(8), random.Random(seed)
        await asyncio.gather(*(play(gate, place, delays.choice([0, 0.001, 0.02])) for place in range(8)))

    asyncio.run(batch())
    assert began == [*range(8)]
