"""Batch arithmetic against the balancer of real batches, and schedules against megatron-core's own."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches

from skyrl_mega.config.precision import row_multiple
from skyrl_mega.config.schema import Config
from skyrl_mega.megatron.micro_batches import split_micro_batches
from skyrl_mega.megatron.packing import pack, padded_lengths
from skyrl_mega.parallel.balance import balance
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.planner.activations import in_flight
from skyrl_mega.planner.batch import batch
from skyrl_mega.trajectories.sequences import Sequences


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.integers(1, 24),
    samples=st.integers(1, 6),
    length=st.integers(2, 300),
    budget=st.integers(1, 900),
    data=st.integers(1, 6),
    context=st.sampled_from([1, 2]),
    stages=st.sampled_from([1, 2]),
)
def test_micro_batches_are_those_of_the_balancer(
    prompts: int, samples: int, length: int, budget: int, data: int, context: int, stages: int
) -> None:
    parallel = ParallelDims(data * context * stages, pipeline=stages, virtual_pipeline=stages, context=context)
    config = Config()
    config.data.prompts_per_step, config.data.samples_per_prompt = prompts, samples
    config.policy.micro_tokens = budget
    config.rollout.max_prompt_tokens, config.rollout.sampling.max_tokens = length // 2, length - length // 2
    planned = batch(config, parallel)
    dealt = balance([length] * planned.trajectories, data, budget * context, stages)
    assert planned.most == len(dealt[0])
    longest = max(len(micro) * length for rank in dealt for micro in rank)
    assert planned.row.tokens * context >= longest
    assert planned.longest == length


@pytest.mark.parametrize(("samples", "budget"), [(8, 1600), (4, 1600), (16, 900)])
@pytest.mark.parametrize("data", [1, 2])
def test_shared_prompts_are_those_of_the_packing(samples: int, budget: int, data: int) -> None:
    """Compares with rows of groups of equal lengths: prompts of 100 tokens, answers of 60."""
    config, parallel = Config(), ParallelDims(data)
    config.policy.share_prefixes, config.policy.micro_tokens = True, budget
    config.data.prompts_per_step, config.data.samples_per_prompt = 16, samples
    config.rollout.max_prompt_tokens, config.rollout.sampling.max_tokens = 100, 60
    config.cluster.rates.length_share = 1.0
    planned = batch(config, parallel)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 1000, 100) for _ in range(16)]
    mini = Sequences.of([np.concatenate([p, rng.integers(0, 1000, 60)]) for p in prompts for _ in range(samples)])
    mini["weights"] = torch.tensor([0.0] * 100 + [1.0] * 60).repeat(len(mini))
    rows = [
        [pack(mini.take(m), context=1, context_rank=0, tensor=1, share=True).read.numel() for m in micros]
        for micros in split_micro_batches(mini, parallel, budget, share=True)
    ]
    assert sum(map(sum, rows)) == pytest.approx(planned.sequences * (planned.mean - planned.shared.left_out), rel=0.15)
    assert abs(len(rows[0]) - planned.usual) <= max(1, 0.15 * planned.usual)
    config.policy.share_prefixes = False
    assert batch(config, parallel).shared.left_out == 0 < planned.shared.left_out


@pytest.mark.parametrize("recipe", ["model", "fp8_current", "fp8_blockwise"])
@pytest.mark.parametrize("parallel", [ParallelDims(8, tensor=8), ParallelDims(8, tensor=2, context=4)], ids=str)
def test_padding_is_that_of_the_packing(recipe: str, parallel: ParallelDims) -> None:
    """Compares the mean padding of rows of random lengths; no row exceeds the planned longest row."""
    config = Config()
    config.cluster.device, config.policy.precision.recipe = "cuda", recipe
    config.data.prompts_per_step, config.data.samples_per_prompt = 64, 8
    config.policy.micro_tokens = 20_000
    config.rollout.max_prompt_tokens = config.rollout.sampling.max_tokens = 3000
    planned = batch(config, parallel)
    rng = np.random.default_rng(0)
    rows, each = (
        row_multiple(config.policy.precision, "te"),
        round(planned.trajectories / (planned.data * planned.usual)),
    )
    added = []
    for _ in range(1000):
        lengths = torch.from_numpy(rng.integers(1, 2 * int(planned.mean), each))
        padding = int((padded_lengths(lengths, parallel.context, parallel.tensor, rows)).sum() - lengths.sum())
        if lengths.sum() <= planned.budget:
            assert lengths.sum() + padding <= planned.row.tokens * parallel.context
        added.append(padding)
    assert planned.padding == pytest.approx(np.mean(added), rel=0.1)


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("count", [12, 24])
def test_micro_batches_in_flight_are_megatrons(stages: int, chunks: int, count: int) -> None:
    parallel = ParallelDims(stages, pipeline=stages, virtual_pipeline=chunks)
    for pp in range(stages):
        group = SimpleNamespace(size=lambda: stages, rank=lambda pp=pp: pp)
        talk = SimpleNamespace(pp_group=group, virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None)
        total, all_in_warm_up, warm_up, _ = get_pp_rank_microbatches(
            count, chunks, stages, False, p2p_communicator=talk
        )
        # The steady state runs one forward before each backward.
        assert in_flight(parallel, pp, count) == (total if all_in_warm_up else warm_up + 1)
