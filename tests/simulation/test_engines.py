"""Engines in virtual time, compared with brute force token by token, and with results computed by hand."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_mega.config.schema import AsynchronyConfig, Config
from skyrl_mega.engines.base import Request
from skyrl_mega.simulation.engines import SimulatedEngine, Speed
from skyrl_mega.simulation.rates import Rates
from skyrl_mega.simulation.simulate import Outcome, simulate
from skyrl_mega.simulation.virtual_time import EndlessWait, VirtualLoop
from skyrl_mega.simulation.workload import LogNormal, Recorded, Synthetic, Turn

SECONDS = (0.0, 0.010, 0.011, 0.013)
"""Seconds per step, by active places; the engine has three places."""


def ends(arrivals: list[tuple[float, int]]) -> list[float]:
    """Returns the end of each request (arrival, tokens)."""

    async def ask(engine: SimulatedEngine, at: float, tokens: int) -> float:
        await asyncio.sleep(at)
        await engine.submit(Request("r", [], 64 * tokens, seed=0))
        return asyncio.get_running_loop().time()

    async def all_of_them(loop: VirtualLoop) -> list[float]:
        engine = SimulatedEngine(loop.loop, Speed(SECONDS, 0.0, 1e9))
        return await asyncio.gather(*(ask(engine, at, tokens) for at, tokens in arrivals))

    with VirtualLoop() as loop:
        return loop.run(all_of_them(loop))


def brute_force(arrivals: list[tuple[float, int]]) -> list[float]:
    """Returns the same in steps of a thousandth of a second."""
    step, now = 1e-3, 0.0
    left = [float(64 * tokens) for _, tokens in arrivals]
    order = sorted(range(len(arrivals)), key=lambda i: (arrivals[i][0], i))
    done: dict[int, float] = {}
    while len(done) < len(arrivals):
        active = [i for i in order if arrivals[i][0] <= now + 1e-12 and i not in done][: len(SECONDS) - 1]
        for i in active:
            left[i] -= step / SECONDS[len(active)]
            if left[i] <= 1e-9:
                done[i] = now + step
        now += step
    return [done[i] for i in range(len(arrivals))]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([0.0, 0.31, 0.77, 2.0]), st.integers(1, 3)), min_size=1, max_size=5))
def test_sequences_share_an_engine(arrivals: list[tuple[float, int]]) -> None:
    apart = [(at + 1e-6 * i, tokens) for i, (at, tokens) in enumerate(arrivals)]  # makes the order of arrival unique
    assert ends(apart) == pytest.approx(brute_force(apart), abs=0.05)


CONFIG = Config()
CONFIG.data.prompts_per_step, CONFIG.data.samples_per_prompt = 8, 4
RATES = Rates(
    engines=2,
    speed=Speed(tuple(0.02 + 0.001 * n for n in range(17)), prefill_s=0.0, cache_tokens=10**9),
    train_s=10 / (32 * 640),
    sync_s=2.0,
)
ALIKE = Synthetic(0, LogNormal(640, 0), LogNormal(0, 0), 1, 10**6)
LONG_TAIL = replace(ALIKE, tokens=LogNormal(640, 1.2))


def outcome(mode: str, most: int, workload: Synthetic = ALIKE, rates: Rates = RATES) -> Outcome:
    return simulate(replace(CONFIG, asynchrony=AsynchronyConfig(mode, most)), rates, workload, steps=6)


def test_a_synchronous_step_is_all_its_parts() -> None:
    """Runs 16 sequences of 640 tokens per engine at once."""
    result = outcome("off", 0)
    generate = 640 * RATES.speed.seconds[16]
    assert result.seconds == pytest.approx(generate + 10 + 2, rel=3e-3)
    assert result.policy_waits == pytest.approx(generate / result.seconds, rel=3e-3)
    assert result.engines_idle == pytest.approx(10 / result.seconds, rel=3e-3)
    assert (result.staleness, result.staleness_max) == (0, 0)


def test_samples_of_a_recorded_prompt_stay_together() -> None:
    """Samples groups: all samples of a hard prompt are slow, and every other step has a hard prompt. Sampled alone,
    nearly all steps would wait for a slow trajectory."""
    groups = [[[Turn(0, 640, wait_s)]] * 4 for wait_s in (0.0, 0.0, 0.0, 30.0)]
    config = replace(CONFIG, data=replace(CONFIG.data, prompts_per_step=2))
    result = simulate(config, RATES, Recorded(groups), steps=6)
    assert result.seconds == pytest.approx(640 * RATES.speed.seconds[4] + 30 / 2 + 10 / 4 + 2, rel=1e-2)


@pytest.mark.parametrize("mode", ["one_step", "full"])
def test_the_slower_side_decides(mode: str) -> None:
    """Runs engines with 640 tokens in 23 s, next to a policy with 10 s of training, and with 100 s."""
    result = outcome(mode, 1)
    assert result.seconds == pytest.approx(640 * RATES.speed.seconds[16] + 2, rel=0.02)
    slow = replace(RATES, train_s=10 * RATES.train_s)
    result = outcome(mode, 1, rates=slow)
    assert result.seconds == pytest.approx(102, rel=3e-3) and result.policy_waits < 1e-6
    assert result.staleness == pytest.approx(1) and result.staleness_max == 1


def test_a_long_tail_is_hidden_by_staleness() -> None:
    seconds = [outcome(mode, most, LONG_TAIL).seconds for mode, most in (("off", 0), ("one_step", 1), ("full", 2))]
    assert seconds[0] > 1.1 * seconds[1] and seconds[1] > 1.1 * seconds[2]
    for most in (1, 2, 4):
        assert outcome("full", most, LONG_TAIL).staleness_max <= most


def test_the_same_seed_is_the_same_run() -> None:
    assert outcome("full", 2, LONG_TAIL) == outcome("full", 2, LONG_TAIL)


def test_waiting_for_ever_is_told() -> None:
    with VirtualLoop() as loop, pytest.raises(EndlessWait):
        loop.run(asyncio.Event().wait())
