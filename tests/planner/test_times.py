"""Times computed from every layer instead of the largest layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from skyrl_mega.config.derived import FUSIONS
from skyrl_mega.config.schema import AlgorithmConfig, Config
from skyrl_mega.config.schema.algorithm import KlConfig
from skyrl_mega.config.schema.entropy import EntropyConfig
from skyrl_mega.megatron.activation_offload import spread
from skyrl_mega.models.registry import architecture
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.planner.activations import kept_layer
from skyrl_mega.planner.batch import batch
from skyrl_mega.planner.moves import host_rate
from skyrl_mega.planner.times import _message_time, _offload_wait, generate_time, policy_times, step_time
from skyrl_mega.weights.plan.topology import Links
from tests.weights.grids import MODELS


@pytest.mark.parametrize(
    "parallel",
    [ParallelDims(8, tensor=2, expert=4), ParallelDims(4, expert=2, expert_tensor=2), ParallelDims(4, context=2)],
    ids=str,
)
def test_messages_are_those_of_every_layer(parallel: ParallelDims) -> None:
    hf = MODELS["qwen3_moe_mixed"]  # one of its layers is dense
    d = architecture(hf).describe(hf)
    layers = [_message_time(d.of_one_layer(d.layer(index)), parallel, Links(), 2) for index in range(d.layers)]
    assert len(d.kinds) == 2
    assert _message_time(d, parallel, Links(), 2) == pytest.approx(sum(layers) / d.layers)
    if parallel.expert > 1:
        assert min(layers) < max(layers)


def test_padding_for_fp8_is_computed_on() -> None:
    """Pads rows to 1,024 tokens, with half a row of padding on average; the recipe's products equal bfloat16's here."""
    hf, parallel = MODELS["qwen3"], ParallelDims(8, tensor=8)
    d, config = architecture(hf).describe(hf), Config()
    config.cluster.device, config.cluster.rates.layer_us = "cuda", 0.0
    plain, _ = policy_times(config, d, parallel, batch(config, parallel))
    config.policy.precision.recipe = "fp8_blockwise"
    planned = batch(config, parallel)
    padded, _ = policy_times(config, d, parallel, planned)
    tokens = planned.trajectories * planned.mean / planned.data / planned.usual  # of a micro-batch
    assert planned.padding == (1024 - 1) / 2
    assert padded / plain == pytest.approx(1 + (planned.padding - 3.5) / (tokens + 3.5), rel=0.02)


def test_counting_the_choices_of_experts_is_a_forward_pass() -> None:
    hf, parallel = MODELS["qwen3_moe_mixed"], ParallelDims(8, expert=4)
    d, config = architecture(hf).describe(hf), Config()
    planned = batch(config, parallel)
    plain, _ = policy_times(config, d, parallel, planned)
    config.policy.moe.aux_loss = 0.1
    balanced, _ = policy_times(config, d, parallel, planned)
    assert 1.2 < balanced / plain < 1.5
    dense = architecture(MODELS["qwen3"]).describe(MODELS["qwen3"])
    without = policy_times(config, dense, ParallelDims(8), planned)
    config.policy.moe.aux_loss = 0.0
    assert policy_times(config, dense, ParallelDims(8), planned) == without


@pytest.mark.parametrize(
    "change",
    [
        {"loss": "clip_cov"},
        {"loss": "kl_cov"},
        {"importance_cap": 2.0, "importance_normalize": True},
        {"entropy": EntropyConfig(top_share=0.2)},
        {"kl": KlConfig(coefficient=0.1, where="reward")},
        {"advantage": "optimal_token_baseline"},
        {"advantage": "optimal_token_baseline", "old_logprobs": "engine"},
    ],
    ids=str,
)
def test_a_pass_for_old_log_probs_is_planned_where_one_optimizer_step_needs_it(change: dict[str, Any]) -> None:
    hf, parallel = MODELS["qwen3_moe_mixed"], ParallelDims(8, expert=4)
    d, config = architecture(hf).describe(hf), Config()
    planned_batch = batch(config, parallel)
    assert planned_batch.updates == 1 and policy_times(config, d, parallel, planned_batch)[1] == 0.0
    several = replace(planned_batch, epochs=2)
    _, one_pass = policy_times(config, d, parallel, several)
    assert one_pass > 0
    config.algorithm = replace(config.algorithm, **change)
    _, planned = policy_times(config, d, parallel, planned_batch)
    config.algorithm = AlgorithmConfig(kl=replace(config.algorithm.kl, where="loss"))  # a reference runs its own pass
    assert planned == pytest.approx(one_pass + policy_times(config, d, parallel, planned_batch)[1])
    config.algorithm = AlgorithmConfig(old_logprobs="engine")
    assert policy_times(config, d, parallel, several)[1] == 0.0


def test_greedy_answers_are_a_round_of_their_own() -> None:
    hf, parallel = MODELS["qwen3_moe_mixed"], ParallelDims(8, expert=4)
    d, config = architecture(hf).describe(hf), Config()
    config.data.prompts_per_step, config.data.samples_per_prompt = 64, 4
    config.rollout.sampling.max_tokens, config.rollout.concurrency = 1024, 1024
    plain = batch(config, parallel)
    assert plain.greedy == 0 and plain.sequences == 256
    sampled = generate_time(config, d, plain)
    config.data.samples_per_prompt = 1
    config.algorithm.advantage = "reinforce"
    alone = generate_time(config, d, batch(config, parallel))
    config.algorithm.advantage, config.data.samples_per_prompt = "remax", 4
    planned = batch(config, parallel)
    assert (planned.greedy, planned.sequences, planned.trajectories) == (64, 256, plain.trajectories)
    assert generate_time(config, d, planned) == pytest.approx(sampled + alone)


def test_slots_of_environments_bound_what_engines_run_at_once() -> None:
    """Compares environment slots with an equal number of engine slots."""
    hf, parallel = MODELS["qwen3_moe_mixed"], ParallelDims(8, expert=4)
    d, config = architecture(hf).describe(hf), Config()
    config.data.prompts_per_step, config.data.samples_per_prompt = 64, 4
    config.rollout.engines, config.rollout.concurrency = 2, 1024
    planned = batch(config, parallel)
    unbounded = generate_time(config, d, planned)
    config.environment.slots = 256
    assert generate_time(config, d, planned) == unbounded, "all of a step"
    config.environment.slots = 20
    bounded = generate_time(config, d, planned)
    config.environment.slots, config.rollout.concurrency = None, 10
    assert bounded == generate_time(config, d, planned) > 1.5 * unbounded
    config.rollout.engines, config.rollout.concurrency = 8, 1024
    seconds = []
    for config.environment.slots in (1, 2, 4, 8, 9, 17, 33):
        seconds.append(generate_time(config, d, planned))
    assert seconds == sorted(seconds, reverse=True) and len({*seconds}) == len(seconds)
    assert seconds[0] > 3 * seconds[2], "more engines than slots help nobody"


def test_a_step_that_generates_ahead_takes_as_long_as_the_slower_side() -> None:
    hf, parallel = MODELS["qwen3_moe_mixed"], ParallelDims(8, expert=4)
    d, config = architecture(hf).describe(hf), Config()
    plain = step_time(config, d, parallel)
    assert plain.ahead == 0 and plain.step == pytest.approx(plain.generate + plain.logprobs + plain.train + plain.sync)
    config.asynchrony.mode = "full"
    seconds = step_time(config, d, parallel)
    assert seconds.step == pytest.approx(max(seconds.generate, seconds.logprobs + seconds.train) + seconds.sync)
    config.asynchrony.max_staleness = 0
    assert step_time(config, d, parallel).step == plain.step


@pytest.mark.parametrize("moved", [1, 2, 4, 6, 12])
@pytest.mark.parametrize("slow", [0.3, 0.9, 1.5, 4.0])
def test_copies_are_waited_for_where_the_layers_between_take_less_time(moved: int, slow: float) -> None:
    """Compares with a simulation of both streams; `slow`: a copy's time in forward passes of a layer."""
    hf, parallel, config = MODELS["qwen3_moe"], ParallelDims(), Config()
    one = architecture(hf).describe(hf)
    d = replace(one.of_one_layer(one.layer(0)), order=(0,) * 12)
    config.policy.offload_layers = moved
    copy = kept_layer(d, parallel, 0, 4096, 2, recompute="none", spec="te", fused=frozenset(FUSIONS)) / host_rate(
        config
    )
    forward = copy / slow
    estimate = _offload_wait(config, d, parallel, 4096, (forward, 2 * forward))
    waited = sum(stalls(12, spread(12, moved), copy, seconds) for seconds in (forward, 2 * forward))
    assert waited - 2.5 * copy <= estimate <= waited + 2.5 * copy


def stalls(layers: int, moving: set[int], copy: float, seconds: float) -> float:
    """Returns the seconds of waiting in the computing stream of a forward pass.

    At the end of each moved layer, the stream waits for the copy of the previous moved layer. A backward pass is the
    same in reverse.
    """
    now = free = waited = 0.0
    before: float | None = None
    for i in range(layers):
        now += seconds
        if i in moving:
            if before is not None and before > now:
                waited, now = waited + before - now, before
            free = before = max(free, now) + copy
    return waited
