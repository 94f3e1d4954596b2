"""Sizes from a single layer against every box of whole models, and the published counts."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest

from skyrl_mega.config.schema import Config
from skyrl_mega.models.blocks.base import EngineCut
from skyrl_mega.models.published import known
from skyrl_mega.models.registry import architecture
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.planner.engine_weights import engine_elements
from skyrl_mega.planner.flops import flops
from skyrl_mega.planner.host_memory import disk
from skyrl_mega.planner.parameters import stage
from tests.weights.grids import MODELS, REAL

LAYOUTS = [
    ("qwen3_moe_mixed", ParallelDims(8, tensor=2, pipeline=2, virtual_pipeline=2, expert=4)),
    ("qwen2_tied", ParallelDims(4, tensor=2, pipeline=2, expert_tensor=2)),
    ("qwen2_tied", ParallelDims(2)),
    ("llama", ParallelDims(4, pipeline=4)),
    ("30B", ParallelDims(32, tensor=2, expert=8)),
    ("30B", ParallelDims(16, tensor=4, pipeline=2, expert=4, expert_tensor=2)),
    ("235B", ParallelDims(256, tensor=4, pipeline=8, expert=16, first_stage_layers=11, last_stage_layers=11)),
    ("GLM-4.5-Air", ParallelDims(32, tensor=4, pipeline=2, expert=16)),
    ("Qwen1.5-MoE-A2.7B", ParallelDims(4, tensor=2, expert=2)),
    ("Moonlight-16B-A3B", ParallelDims(8, tensor=2, expert=8)),
]


def config_of(model: str) -> dict[str, Any]:
    """Returns a config.json by the name of a test model or of a published model."""
    return {**MODELS, **REAL}.get(model) or known(model)


@pytest.mark.parametrize(("model", "parallel"), LAYOUTS, ids=str)
def test_a_stage_is_all_of_its_ranks_parameters_in_their_order(model: str, parallel: ParallelDims) -> None:
    hf = config_of(model)
    arch = architecture(hf)
    for pp in range(parallel.pipeline):
        rank = next(r for r in range(parallel.ranks) if parallel.coordinates(r).pp == pp)
        whole = arch.megatron_shard(hf, parallel, rank, "local").params
        chunks = stage(arch.describe(hf), parallel, pp)
        for number, chunk in enumerate(chunks):
            mine = {name: prod(shape) for name, shape in whole.items() if name.startswith(f"{number}.")}
            assert chunk.numel.tolist() == list(mine.values())
            assert chunk.expert.tolist() == [".experts." in name for name in mine]
            biases = [name.endswith("expert_bias") for name in mine]
            assert chunk.fixed.tolist() == biases
            assert {*chunk.numel[chunk.fixed].tolist()} == ({hf["n_routed_experts"]} if any(biases) else set())


@pytest.mark.parametrize(("model", "parallel"), LAYOUTS, ids=str)
def test_a_critics_stage_has_a_value_head_and_no_output_projection(model: str, parallel: ParallelDims) -> None:
    hf = config_of(model)
    arch = architecture(hf, "value")
    for rank in {parallel.ranks // parallel.pipeline * pp for pp in range(parallel.pipeline)}:
        whole = arch.megatron_shard(hf, parallel, rank, "local").params
        held = [chunk.numel.tolist() for chunk in stage(arch.describe(hf), parallel, parallel.coordinates(rank).pp)]
        assert [n for chunk in held for n in chunk] == [prod(shape) for shape in whole.values()]
        assert not any("output_layer" in name for name in whole)
    assert len([name for name in whole if name.endswith("value_head.weight")]) == 1, "the last stage's"


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize(
    ("model", "tensor", "data"),
    [("qwen3_moe_mixed", 2, 2), ("qwen2_tied", 2, 1), ("30B", 8, 1), ("Moonlight-16B-A3B", 4, 1)],
)
def test_an_engine_worker_is_all_of_its_boxes(model: str, tensor: int, data: int, experts: bool) -> None:
    hf = config_of(model)
    arch = architecture(hf)
    for worker in (0, tensor * data - 1):
        params = arch.engine_shard(hf, tensor, worker, experts, data).params
        assert engine_elements(arch.describe(hf), EngineCut(tensor, experts, data), worker).all == sum(
            map(prod, params.values())
        )


def test_a_frozen_router_is_frozen_with_its_bias() -> None:
    hf, routers = known("gpt-oss-20b"), 24 * 32 * (2880 + 1)
    decoder = architecture(hf).describe(hf)
    (chunk,) = stage(decoder, ParallelDims(1), 0)
    assert chunk.numel[chunk.router].sum() == routers
    config = Config()
    config.model.dtype = "bfloat16"
    trained = disk(config, decoder).checkpoint
    config.policy.moe.freeze_router = True
    assert trained - disk(config, decoder).checkpoint == routers * (4 + 8 - 2), "no master weight, no moments"


ACTIVE = {
    "Qwen3-30B-A3B": 3.35e9,
    "Qwen3-235B-A22B": 22.2e9,
    "DeepSeek-V3": 37.6e9,
    "Kimi-K2-Instruct": 32.9e9,
    "Moonlight-16B-A3B": 2.9e9,
    "DeepSeek-V2-Lite": 2.66e9,
    "GLM-4.5": 33.6e9,
    "GLM-4.5-Air": 13.4e9,
    "GLM-4.7-Flash": 3.9e9,
    "MiniMax-M2": 11.0e9,
    "Mixtral-8x7B-v0.1": 12.9e9,
    "Qwen1.5-MoE-A2.7B": 2.7e9,
    "Qwen2-57B-A14B": 14.2e9,
}
"""Parameters of a token: all of transformers' model without the experts that are not chosen."""


@pytest.mark.parametrize(("name", "active"), ACTIVE.items())
def test_what_a_token_meets_is_what_the_names_promise(name: str, active: float) -> None:
    """Compares with the model cards, which leave out an embedding in part: 3.3, 22, 37, 32 · 10⁹ parameters, …"""
    hf = known(name)
    d = architecture(hf).describe(hf)
    assert flops(d).matrices / 2 + d.vocab * d.hidden == pytest.approx(active, rel=0.01)
