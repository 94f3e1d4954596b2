"""Durations of a run and the error bar, compared with computations by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from skyrl_mega.config.schema import Config
from skyrl_mega.models.decoder import Decoder
from skyrl_mega.models.registry import architecture
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.planner.batch import batch
from skyrl_mega.planner.rates import Rate
from skyrl_mega.planner.run_time import FORMULAS, Counts, Planned, columns, error_bar
from skyrl_mega.planner.times import rollout_times, step_time
from skyrl_mega.planner.trajectories import Trajectories, assumed, sizes_of
from tests.weights.grids import MODELS

PARALLEL = ParallelDims(8, expert=4)
LAYER_S = 1e-3


def slow_layers() -> tuple[Config, Decoder]:
    """Returns settings in which a decoding step takes a millisecond per layer and nothing else, all at once."""
    config, hf = Config(), MODELS["qwen3_moe_mixed"]
    config.cluster.device, config.rollout.eager = "cuda", False
    rates = config.cluster.rates
    rates.tflops, rates.memory_gb_s, rates.engine_layer_us = 1e12, 1e12, 1e6 * LAYER_S
    config.data.prompts_per_step, config.data.samples_per_prompt = 16, 4
    config.rollout.concurrency, config.rollout.sampling.max_tokens = 1024, 1000
    return config, architecture(hf).describe(hf)


def played(*sample: tuple[float, float], environment_s: float = 0.0) -> Trajectories:
    return Trajectories(read=50.0, written=100.0, sample=sample, environment_s=environment_s)


def test_the_slowest_trajectory_decides_what_environments_add() -> None:
    each = played((100, 5.0), (200, 0.0))
    assert each.waiting(0.01) == pytest.approx(6.0 - 2.0), "1 s of tokens and 5 s of tools, beside 2 s of tokens"
    assert each.waiting(1.0) == 0.0, "the longest hides the other's tools"
    assert each.longest == 200


def test_generation_takes_as_long_as_the_longest() -> None:
    config, decoder = slow_layers()
    given = played((300.0, 0.0), (20.0, 0.0))
    token_s = decoder.layers * LAYER_S
    times = step_time(config, decoder, PARALLEL, 0.0, given)
    assert times.generate == pytest.approx(300 * token_s, rel=1e-3) and times.tools == 0
    config.cluster.rates.engine_step_us, config.cluster.rates.trajectory_us = 2000.0, 500.0
    slower = step_time(config, decoder, PARALLEL, 0.0, given)
    assert slower.generate == pytest.approx(300 * (token_s + 2e-3) + 64 * 5e-4, rel=1e-3)


@pytest.mark.parametrize(
    ("rate", "phase", "without"), [("sync_s", "sync", 1.5), ("step_s", "other", 0.0)], ids=["sync", "driver"]
)
def test_fixed_seconds_are_added_once(rate: str, phase: str, without: float) -> None:
    config, decoder = slow_layers()
    before = step_time(config, decoder, PARALLEL, 1.5)
    setattr(config.cluster.rates, rate, 0.25)
    after = step_time(config, decoder, PARALLEL, 1.5)
    assert (getattr(before, phase), getattr(after, phase)) == (without, without + 0.25)
    assert after.step - before.step == pytest.approx(0.25)


def test_launches_of_layers_without_experts_are_hidden_by_their_products() -> None:
    """The host waits for a GPU in layers with experts only; a CPU computes what it launches."""
    config, hf = Config(), MODELS["qwen3"]
    decoder, parallel = architecture(hf).describe(hf), ParallelDims(8)
    config.policy.micro_tokens = 4096

    def train(device: str, layer_us: float) -> float:
        config.cluster.device, config.cluster.rates.layer_us = device, layer_us
        return step_time(config, decoder, parallel, 0.0).train

    assert train("cuda", 0.0) == train("cuda", 1e-3) < train("cuda", 1e5) < train("cpu", 1e5)
    assert train("cpu", 0.0) < train("cpu", 1.0)


def test_launches_of_the_policy_slow_no_engine() -> None:
    config, decoder = slow_layers()
    before = step_time(config, decoder, PARALLEL, 0.0)
    config.cluster.rates.layer_us *= 10
    after = step_time(config, decoder, PARALLEL, 0.0)
    assert after.generate == before.generate and after.train > before.train


def test_calls_take_turns_at_the_workers() -> None:
    """64 trajectories of 10 s each at 4 workers take 160 s."""
    config, decoder = slow_layers()
    config.environment.workers = 4
    given = played((100.0, 10.0), environment_s=10.0)
    bounded, sizes = sizes_of(config, PARALLEL, given)
    engines, tools = rollout_times(bounded, decoder, sizes, given)
    assert engines + tools == pytest.approx(160.0)
    assert step_time(config, decoder, PARALLEL, 0.0, given).step > 160.0
    bounded.environment.workers = 1000
    assert rollout_times(bounded, decoder, sizes, given)[1] == pytest.approx(10.0), "only the slowest trajectory's"
    bounded.environment.slots = 2
    assert sum(rollout_times(bounded, decoder, sizes, given)) >= 320.0, "slots bound the calls, too"


def test_more_groups_without_a_signal_take_more_rounds() -> None:
    config, decoder = slow_layers()
    config.algorithm.dynamic_sampling.enabled = True
    given, generate = played((100.0, 0.0)), []
    for signal in (1.0, 0.5, 0.25):
        generate.append(step_time(config, decoder, PARALLEL, 0.0, replace(given, signal=signal)).generate)
    once = generate[0]
    assert generate[1] == pytest.approx(5 * once, rel=1e-3), "16, 8, 4, 2, 1 prompts, each as long as the longest"
    assert generate[2] > generate[1]


def test_assumed_trajectories_change_no_estimate() -> None:
    config, decoder = slow_layers()
    config.cluster.rates.tflops, config.cluster.rates.memory_gb_s = 989.0, 3350.0
    usual = step_time(config, decoder, PARALLEL, 1.0)
    given = step_time(config, decoder, PARALLEL, 1.0, assumed(config, PARALLEL))
    assert given.step == pytest.approx(usual.step, rel=1e-9)
    sizes = batch(config, PARALLEL)
    assert assumed(config, PARALLEL).mean == pytest.approx(sizes.mean)


def test_the_columns() -> None:
    config, _ = slow_layers()
    config.rollout.max_prompt_tokens = 400
    each = columns(config, PARALLEL, assumed(config, PARALLEL))
    assert [each[name].written for name in ("short", "mean", "limit")] == [250, 500, 1000]
    assert [each[name].read for name in ("short", "mean", "limit")] == [100, 200, 400]
    given = columns(config, PARALLEL, played((900.0, 3.0), (80.0, 0.0)))
    assert (given["short"].written, given["short"].longest) == (50, 450)
    assert given["limit"].sample == ((1000, 3.0), (1000, 0.0)), "seconds of environments stay"


def test_a_run_has_evaluations_and_checkpoints() -> None:
    config, decoder = slow_layers()
    config.evaluation.every, config.checkpoint.every, config.cluster.rates.disk_gb_s = 10, 10, 2.0
    given = played((300.0, 0.0))
    planned = Planned(decoder, PARALLEL, lambda _: 0.5, Counts(steps=25, evaluated=64, checkpoint_bytes=40_000_000_000))
    run = planned.run_time(config, given)
    assert (run.steps, run.evaluations, run.checkpoints) == (25, 4, 3), "before the first, after 10, 20 and the last"
    assert run.checkpoint == pytest.approx(20.0)
    assert run.evaluation == pytest.approx(300 * decoder.layers * LAYER_S, rel=1e-3), "64 at once, like a step"
    assert run.seconds == pytest.approx(25 * run.step.step + 4 * run.evaluation + 3 * 20.0)
    assert run.values["whole"] == pytest.approx(run.seconds / 25)
    assert run.values["checkpoint"] == pytest.approx(60.0 / 25)
    config.evaluation.before, config.evaluation.every, config.checkpoint.every = False, 0, 0
    plain = planned.run_time(config, given)
    assert plain.seconds == pytest.approx(25 * plain.step.step)
    none = replace(planned, counts=replace(planned.counts, steps=0))
    assert none.run_time(config, given).seconds == 0
    bar = error_bar(lambda *moved: none.run_time(*moved).seconds, config, given, [], [given])
    assert bar.high == pytest.approx(FORMULAS)


def test_uncertain_inputs_are_added_in_quadrature() -> None:
    """Moves two rates by hand: seconds are 60 / a + 40 / b, both uncertain by a factor of 2."""
    config, given = Config(), played((100.0, 0.0))
    config.cluster.rates.host_gb_s, config.cluster.rates.disk_gb_s = 1.0, 1.0

    def seconds(moved: Config, trajectories: Trajectories) -> float:
        rates = moved.cluster.rates
        return (60.0 / rates.host_gb_s + 40.0 / rates.disk_gb_s) * trajectories.written / 100.0

    rates = [Rate(f"cluster.rates.{name}", 1.0, "assumed", 2.0) for name in ("host_gb_s", "disk_gb_s")]
    bar = error_bar(seconds, config, given, [*rates, Rate("cluster.rates.tflops", 989.0, "sheet", 1.0)])
    squares = math.log(1.6) ** 2 + math.log(1.4) ** 2 + math.log(FORMULAS) ** 2
    assert bar.high == pytest.approx(math.exp(math.sqrt(squares)))
    squares = math.log(0.7) ** 2 + math.log(0.8) ** 2 + math.log(FORMULAS) ** 2
    assert bar.low == pytest.approx(math.exp(-math.sqrt(squares)))
    assert [cause.name for cause in bar.causes] == ["cluster.rates.host_gb_s", "cluster.rates.disk_gb_s", "formulas"]
    lengths = [replace(given, written=50.0), replace(given, written=300.0)]
    [cause, *_] = error_bar(seconds, config, given, rates, lengths).causes
    assert (cause.low, cause.high) == (0.5, 3.0)
