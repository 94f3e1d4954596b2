"""Rates of the planner for the workload's lengths; and few trajectories standing for many."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import cache

import pytest

from skyrl_mega.cli.dry_run import checked
from skyrl_mega.config.compose import compose
from skyrl_mega.config.schema import AsynchronyConfig, Config, EnvironmentConfig
from skyrl_mega.models.decoder import Decoder
from skyrl_mega.models.registry import architecture
from skyrl_mega.planner.batch import batch
from skyrl_mega.planner.fit import parallel_of
from skyrl_mega.planner.times import decoding, step_time
from skyrl_mega.simulation import rates as module
from skyrl_mega.simulation.calls import Calls, Places
from skyrl_mega.simulation.engines import Speed
from skyrl_mega.simulation.rates import Rates, prompts_played, scale_down
from skyrl_mega.simulation.simulate import simulate
from skyrl_mega.simulation.virtual_time import VirtualLoop
from skyrl_mega.simulation.workload import Length, LogNormal, Synthetic

SMALL = [
    "data.prompts_per_step=16",
    "data.samples_per_prompt=4",
    "data.mini_batch_prompts=null",
    "cluster.rates.step_s=0.5",
]


@cache
def search() -> tuple[Config, Decoder]:
    config = compose("configs/searchr1_30b.yaml", SMALL)
    hf, _ = checked(config)
    return config, architecture(hf).describe(hf)


def planned(length: Length, asynchrony: AsynchronyConfig | None = None) -> Rates:
    config, decoder = search()
    return Rates.planned(
        replace(config, asynchrony=asynchrony or AsynchronyConfig()), decoder, parallel_of(config)[0], length
    )


def test_with_the_settings_lengths_they_are_the_planners() -> None:
    config, decoder = search()
    parallel, _ = parallel_of(config)
    planned_batch, times = batch(config, parallel), step_time(config, decoder, parallel)
    rates = planned(Length(planned_batch.mean - planned_batch.generated, planned_batch.generated, 1))
    assert rates.train_s * planned_batch.sequences * planned_batch.mean == pytest.approx(
        times.logprobs + times.critic + times.train
    )
    assert rates.speed.seconds[3] == pytest.approx(decoding(config, decoder, planned_batch.mean)(3))
    assert rates.sync_s == pytest.approx(times.sync + times.residency) and times.residency
    assert rates.other_s == 0.5


def test_lengths_are_those_of_the_workload() -> None:
    short, long = planned(Length(500, 500, 1)), planned(Length(4000, 16000, 1))
    assert long.speed.seconds[8] > 1.02 * short.speed.seconds[8], "more is read for each token"
    assert long.speed.prefill_s > 1.1 * short.speed.prefill_s
    assert long.train_s < short.train_s, "an optimizer step is for more tokens"


def test_engines_have_places_for_all_that_is_under_way() -> None:
    each = 16 * 4 // 4
    modes = (("off", 1), ("one_step", 1), ("full", 0), ("full", 2), ("full", 4))
    places = [planned(Length(500, 500, 1), AsynchronyConfig(*mode)).speed.places for mode in modes]
    assert places == [each, each, each, 3 * each, 5 * each]


@pytest.mark.parametrize("prompts", [64, 100, 257, 2048])
@pytest.mark.parametrize(("engines", "places"), [(1, 1), (2, 3), (6, 64), (7, 100), (64, 5)])
def test_fewer_trajectories_do_the_same_work(prompts: int, engines: int, places: int) -> None:
    speed = Speed((0.0, *(0.01 + 0.001 * n for n in range(1, places + 1))), prefill_s=1e-4, cache_tokens=1e6)
    config = Config()
    config.data.prompts_per_step, config.data.samples_per_prompt = prompts, 8
    less, scaled = scale_down(config, Rates(engines, speed, train_s=1e-3, sync_s=2.0, other_s=0.5))
    factor = prompts / less.data.prompts_per_step
    assert less.data.prompts_per_step * 8 <= module.MAX_TRAJECTORIES and less.data.prompts_per_step == prompts_played(
        config
    )
    # Tokens per second of all engines: written with all places taken, read, and trained on.
    written = factor * scaled.engines * scaled.speed.places / scaled.speed.seconds[-1]
    assert written == pytest.approx(engines * places / speed.seconds[-1])
    assert factor * scaled.engines / scaled.speed.prefill_s == pytest.approx(engines / speed.prefill_s)
    assert factor / scaled.train_s == pytest.approx(1 / 1e-3)
    assert (scaled.sync_s, scaled.other_s) == (2.0, 0.5)
    assert factor * scaled.engines * scaled.speed.cache_tokens == pytest.approx(engines * 1e6)
    # The same with some places taken.
    for n, seconds in enumerate(scaled.speed.seconds[1:-1], start=1):
        each = n * factor * scaled.engines / engines
        assert seconds == pytest.approx(0.01 + 0.001 * each)


def test_fewer_trajectories_take_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates a single place: four trajectories stand for sixteen in turn."""
    config = Config()
    config.data.prompts_per_step, config.data.samples_per_prompt = 8, 2
    rates = Rates(2, Speed((0.0, 0.01), 0.001, 1e9), train_s=1e-3, sync_s=2.0)
    workload = Synthetic(100, LogNormal(1000, 0), LogNormal(0, 0), 1, 10**6)
    seconds = 8 * (0.1 + 10) + 16 * 1.1 + 2
    for most in (512, 4):
        monkeypatch.setattr(module, "MAX_TRAJECTORIES", most)
        assert simulate(config, rates, workload, steps=2).seconds == pytest.approx(seconds, rel=1e-2)


def waiting(most: int, workload: Synthetic, environment: EnvironmentConfig, monkeypatch: pytest.MonkeyPatch) -> float:
    """Returns the seconds of a step of 256 trajectories, `most` of them simulated, with mostly waiting for tools."""
    monkeypatch.setattr(module, "MAX_TRAJECTORIES", most)
    config = Config()
    config.data.prompts_per_step, config.data.samples_per_prompt = 256, 1
    config.asynchrony, config.environment = AsynchronyConfig("off"), environment
    rates = Rates(1, Speed((0.0, *[1e-3] * 256), 0.0, 1e9), train_s=1e-7, sync_s=0.1)
    return simulate(config, rates, workload, steps=2).seconds


@pytest.mark.parametrize("bound", ["slots", "workers"])
@pytest.mark.parametrize("places", [1, 2, 3, 5, 7, 8, 9, 12, 15, 16, 24, 40])
def test_any_number_of_slots_and_of_calls_is_that_of_all(
    bound: str, places: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compares with a run of all 256 trajectories: each of 32 stands for 8."""
    workload = Synthetic(20, LogNormal(100, 0), LogNormal(5, 0), 2, 10**6)
    environment = EnvironmentConfig(**{"workers": 256, bound: places})
    all_of_them, few = (waiting(most, workload, environment, monkeypatch) for most in (256, 32))
    assert few == pytest.approx(all_of_them, rel=0.1)


def test_a_call_is_as_long_as_it_is_and_its_place_is_taken_for_longer() -> None:
    """Divides 12 calls by 8: two places, each taken for 4/3 of the time."""
    with VirtualLoop() as loop:
        calls = Calls(Places.of(12, 8), loop.loop)

        async def ends(count: int) -> list[float]:
            async def one() -> float:
                await calls.run(90)
                return loop.now

            return await asyncio.gather(*(one() for _ in range(count)))

        assert loop.run(ends(5)) == pytest.approx([90, 90, 210, 210, 330])
