"""Runs small enough for results by hand: an engine with a single place, and a trajectory per step.

The engine reads 20 tokens in 1 s and writes 200 in 10 s; the policy trains for T seconds, and a sync takes 2 s.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from skyrl_mega.config.schema import AsynchronyConfig, Config, EnvironmentConfig
from skyrl_mega.simulation.engines import Speed
from skyrl_mega.simulation.rates import Rates
from skyrl_mega.simulation.simulate import Outcome, simulate
from skyrl_mega.simulation.workload import LogNormal, Synthetic

SYNC = 2.0
ONE_TURN = Synthetic(20, LogNormal(200, 0), LogNormal(0, 0), 1, 10**6)
TWO_TURNS = replace(ONE_TURN, turns=2, environment=LogNormal(5, 0))
SPEED = Speed((0.0, 0.05), prefill_s=0.05, cache_tokens=10**6)


def played(
    mode: str,
    most: int,
    *,
    train: float,
    workload: Synthetic = ONE_TURN,
    speed: Speed = SPEED,
    prompts: int = 1,
    environment: EnvironmentConfig | None = None,
    other: float = 0.0,
) -> Outcome:
    config = Config()
    config.data.prompts_per_step, config.data.samples_per_prompt = prompts, 1
    config.asynchrony = AsynchronyConfig(mode, most)
    config.environment = environment or EnvironmentConfig()
    return simulate(config, Rates(1, speed, train / prompts / 220, SYNC, other), workload, steps=4)


def check(result: Outcome, *, seconds: float, waits: float, idle: float, runs: float) -> None:
    """Compares the seconds of a step, and within a step the seconds of a waiting policy, of an idle engine, and of a
    busy engine."""
    assert result.seconds == pytest.approx(seconds, rel=1e-3)
    shares = result.policy_waits, result.engines_idle, result.engines_filled
    assert shares == pytest.approx((waits / seconds, idle / seconds, runs / seconds), abs=2e-3)


def test_synchronous() -> None:
    """Runs: read 1, write 10 | train 4 | sync 2."""
    result = played("off", 1, train=4)
    check(result, seconds=17, waits=11, idle=4, runs=11)
    assert (result.staleness, result.staleness_max) == (0, 0)


def test_one_step_that_waits_for_its_engine() -> None:
    """Runs: train 4, wait 7 | sync 2; meanwhile read 1, write 10."""
    result = played("one_step", 1, train=4)
    check(result, seconds=13, waits=7, idle=0, runs=11)
    assert (result.staleness, result.staleness_max) == (1, 1)


def test_engines_write_while_the_driver_works() -> None:
    """Runs: train 4, driver 3, wait 4 | sync 2; meanwhile read 1, write 10."""
    check(played("one_step", 1, train=4, other=3), seconds=13, waits=4, idle=0, runs=11)
    without, with_driver = (played("off", 0, train=4, other=other).seconds for other in (0.0, 3.0))
    assert with_driver == pytest.approx(without + 3, rel=1e-3)


@pytest.mark.parametrize("mode", ["one_step", "full"])
def test_ahead_of_a_slow_policy(mode: str) -> None:
    """Runs: train 20 | sync 2; meanwhile read 1, write 10, idle 9."""
    result = played(mode, 1, train=20)
    check(result, seconds=22, waits=0, idle=9, runs=11)
    assert (result.staleness, result.staleness_max) == (1, 1)


def test_full_reads_again_what_a_sync_has_interrupted() -> None:
    """Runs: train 4 | sync 2 | wait 11; meanwhile read 1, write 3 | – | read 1 + 3 again, write 7. Meanwhile the next
    trajectory waits for a place: 60 of the 200 tokens are older than the weights in training."""
    result = played("full", 1, train=4)
    check(result, seconds=17, waits=11, idle=0, runs=15)
    assert result.staleness == pytest.approx(0.3, abs=1e-2) and result.staleness_max == 1


def test_full_has_groups_of_all_steps_under_way() -> None:
    """Runs: wait 3 | train 4 | sync 2; meanwhile a trajectory from the step before writes for 3, and a new trajectory
    for 7."""
    two = Speed((0.0, 0.05, 0.05), prefill_s=0.0, cache_tokens=10**6)
    result = played("full", 1, train=4, speed=two)
    check(result, seconds=9, waits=3, idle=0, runs=(3 + 7) / 2)
    assert result.staleness == pytest.approx(0.7, abs=1e-2)


def test_turns_go_on_from_what_is_cached() -> None:
    """Runs: read 1, write 5, tool 5, write 5, tool 5 | train 4 | sync 2."""
    check(played("off", 1, train=4, workload=TWO_TURNS), seconds=27, waits=21, idle=14, runs=11)


def test_what_the_cache_does_not_hold_is_read_again() -> None:
    """Reads 120 tokens in the second turn: 6 s more."""
    small = replace(SPEED, cache_tokens=119)
    check(played("off", 1, train=4, workload=TWO_TURNS, speed=small), seconds=33, waits=27, idle=14, runs=17)


def test_more_trajectories_than_places_take_turns() -> None:
    """Runs: two of 11 s, consecutively | train 4 | sync 2."""
    check(played("off", 1, train=4, prompts=2), seconds=28, waits=22, idle=4, runs=22)


TOOL = replace(ONE_TURN, environment=LogNormal(100, 0))
BOTH = Speed((0.0, 0.05, 0.05), prefill_s=0.0, cache_tokens=10**6)


def test_one_call_of_an_environment_at_a_time() -> None:
    """Runs: both write for 10; call 100, and call 100 | train 4 | sync 2."""
    for workers, seconds in ((2, 116), (1, 216)):
        result = played(
            "off", 1, train=4, workload=TOOL, speed=BOTH, prompts=2, environment=EnvironmentConfig(workers=workers)
        )
        assert result.seconds == pytest.approx(seconds, rel=1e-3)
        assert result.calls_filled == pytest.approx(200 / seconds / workers, rel=1e-3)


def test_one_environment_open_at_a_time() -> None:
    """Runs: write 10, call 100; write 10, call 100 | train 4 | sync 2."""
    result = played("off", 1, train=4, workload=TOOL, speed=BOTH, prompts=2, environment=EnvironmentConfig(slots=1))
    assert result.seconds == pytest.approx(226, rel=1e-3)
    assert result.calls_filled == pytest.approx(200 / 226, rel=1e-3), "a second call has no environment that is open"


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_fewer_trajectories_have_as_many_calls_done(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plays 3 of 8 trajectories; the calls take as long as those of all 8: 8 · 100 / workers."""
    monkeypatch.setattr("skyrl_mega.simulation.rates.MAX_TRAJECTORIES", 3)
    environment = EnvironmentConfig(workers=workers)
    result = played("full", 4, train=4, workload=TOOL, speed=BOTH, prompts=8, environment=environment)
    assert result.seconds * result.calls_filled == pytest.approx(800 / workers, rel=0.05)
    assert result.calls_filled > 0.9
