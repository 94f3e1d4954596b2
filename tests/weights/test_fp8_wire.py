"""FP8 on the wire: numbers and scales equal the whole tensor's, quantised at once, for every sharding."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from skyrl_mega.config.schema import BuildConfig
from skyrl_mega.kernels.block_fp8 import BLOCK
from skyrl_mega.models.registry import architecture
from skyrl_mega.models.tiny import hf_config
from skyrl_mega.parallel.box import Layout, Shard
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.weights.fp8.format import FP8, SUFFIX, Wire, quantised, with_scales
from skyrl_mega.weights.fp8.scales import straddled, without_own_blocks
from skyrl_mega.weights.plan.plan import plan
from skyrl_mega.weights.plan.topology import Links, Topology
from tests.support.ranks import run_ranks
from tests.weights.grids import LAYOUTS, cut, empty, global_tensors
from tests.weights.meeting import Case, Staged, exchange, same

ODD: dict[str, Any] = {
    **hf_config(BuildConfig(architecture="qwen3_moe", layers=2)),
    "hidden_size": 256,
    "head_dim": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_experts": 4,
    "moe_intermediate_size": 192,
}
"""A model with heads of 32 rows and experts of 192 columns.

With ETP2, both ranks hold parts of a block, and k and v begin inside blocks."""
EVEN: dict[str, Any] = {
    **ODD,
    "head_dim": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 256,
}
"""A model served in FP8 by vLLM: every piece of a worker begins at a block."""


def weights(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    """Returns bfloat16 weights with very different magnitudes per block."""
    tensors = global_tensors(shapes, seed)
    return {name: (t * torch.linspace(0.01, 3, t.numel()).view(t.shape)).bfloat16() for name, t in tensors.items()}


def whole_tensors(tensors: dict[str, Tensor], names: frozenset[str]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns FP8 numbers and scales of whole tensors, computed block by block in plain torch. Other tensors stay."""
    numbers, scales = dict(tensors), {}
    for name in names:
        weight = tensors[name].float()
        rows, columns = (math.ceil(n / BLOCK) for n in weight.shape)
        scale, number = torch.empty(rows, columns), torch.empty(weight.shape, dtype=FP8)
        for i in range(rows):
            for j in range(columns):
                here = (slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK))
                scale[i, j] = weight[here].abs().max().clamp(min=1e-4) / 448
                number[here] = (weight[here] * (1 / scale[i, j])).to(FP8)
        numbers[name], scales[name + SUFFIX] = number, scale
    return numbers, scales


def types(shard: Shard, wire: Wire, numbers: bool) -> dict[str, torch.dtype]:
    """Returns the types of an engine's parameters: the wire's if `numbers`, else bfloat16 (scales keep theirs)."""
    dtypes = {}
    for piece in shard.pieces:
        kept = numbers or piece.tensor.endswith(SUFFIX)
        dtypes[piece.param] = wire.type_of(piece.tensor) if kept else torch.bfloat16
    return dtypes


def sync(rank: int, address: str, case: Case, numbers: bool, kept: bool = False) -> float:
    """Runs two syncs. With `kept`, the policy holds FP8 weights and scales."""
    source, target = case.layouts()
    names = quantised(target.tensors)
    wire = Wire(torch.bfloat16, names)
    source, target = with_scales(source, names), with_scales(target, names)
    ranks = case.parallel.ranks
    built, transfer_plan, _kept = exchange(rank, address, case, source, target, wire)
    mine = source.shards[rank] if rank < ranks else target.shards[rank - ranks]
    for seed, checksums in ((1, True), (2, False)):
        tensors = weights({name: shape for name, shape in source.tensors.items() if name not in wire.scales}, seed)
        if rank < ranks:
            plain = case.layouts()[0].shards[rank]
            params = {name: param.bfloat16() for name, param in cut(plain, tensors).items()}
            if kept:
                whole, scale = whole_tensors(tensors, names)
                rounded = cut(mine, {name: t.float() for name, t in (whole | scale).items()})
                of = {piece.param: wire.type_of(piece.tensor) for piece in mine.pieces}
                params = {name: t.to(of[name]) for name, t in rounded.items()}
            report = built.run(source=params, checksums=checksums)
            continue
        expected, scales = whole_tensors(tensors, names)
        if not numbers:
            stretched = {
                name: scales[name + SUFFIX].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1) for name in names
            }
            for name in names:
                rows, columns = expected[name].shape
                expected[name] = (expected[name].float() * stretched[name][:rows, :columns]).bfloat16()
        wanted = types(mine, wire, numbers)
        params = {name: tensor.to(wanted[name]) for name, tensor in empty(mine).items()}
        given = params if numbers else {k: v for k, v in params.items() if SUFFIX not in k}
        staged = Staged(given) if numbers else given
        report = built.run(target=staged, checksums=checksums, loaded=staged.finish if numbers else None)
        actual = cut(mine, {name: t.float() for name, t in (expected | scales).items()})
        assert same({k: v.float() for k, v in given.items()}, {k: actual[k] for k in given})
        assert report.received + report.local == transfer_plan.bytes_in[rank - ranks]
    return report.quantise_s


NODES = Links(gpus_per_node=4, nics_per_node=4)
CASES = {
    "ETP2 cuts blocks": (ODD, "tp2 ep2 etp2", dict(engine=1)),
    "ETP2 cuts blocks, in buckets smaller than a block": (ODD, "tp2 ep2 etp2", dict(engine=1, bucket_bytes=6000)),
    "ETP2 to TP2 that cuts blocks too": (ODD, "tp2 ep2 etp2", dict(engine=2)),
    "PP2 to two engines in another node": (EVEN, "pp2", dict(engines=2, topology=Topology((0, 1), (4, 5), NODES))),
    "shared devices": (EVEN, "tp2 ep2 etp2", dict(engine=2, engines=2, topology=Topology.shared(4, 4, NODES))),
}


@pytest.mark.parametrize("numbers", [True, False], ids=["engine keeps FP8", "engine keeps BF16"])
@pytest.mark.parametrize("hf, layout, more", CASES.values(), ids=CASES)
def test_fp8_is_that_of_the_whole_tensor(hf: dict[str, Any], layout: str, more: dict[str, Any], numbers: bool) -> None:
    case = replace(Case(hf, LAYOUTS[layout], bucket_bytes=40_000), **more)
    run_ranks(case.size, sync, case, numbers)


@pytest.mark.parametrize("numbers", [True, False], ids=["engine keeps FP8", "engine keeps BF16"])
@pytest.mark.parametrize("name", [name for name, (hf, _, _) in CASES.items() if hf is EVEN])
def test_a_policy_in_fp8_sends_its_own_numbers_and_scales(name: str, numbers: bool) -> None:
    hf, layout, more = CASES[name]
    case = replace(Case(hf, LAYOUTS[layout], bucket_bytes=40_000), **more)
    run_ranks(case.size, sync, case, numbers, True)


def test_blocks_that_are_the_wires() -> None:
    for hf, expected_tensor in ((EVEN, None), (ODD, "model.layers.0.mlp.experts.0.down_proj.weight")):
        policy, _ = layouts(hf)
        assert without_own_blocks(policy, quantised(policy.tensors)) == expected_tensor


def layouts(hf: dict[str, Any], engine: int = 1) -> tuple[Layout, Layout]:
    arch = architecture(hf)
    return arch.megatron_layout(hf, LAYOUTS["tp2 ep2 etp2"], "local"), arch.engine_layout(hf, engine, 1)


def test_router_norms_embedding_and_head_stay() -> None:
    names = quantised(layouts(ODD)[1].tensors)
    other = {name.rpartition("layers.")[2] for name in layouts(ODD)[1].tensors if name not in names}
    assert {name.partition(".")[2] for name in other if name[0].isdigit()} == {
        "input_layernorm.weight", "post_attention_layernorm.weight", "mlp.gate.weight",
        "self_attn.q_norm.weight", "self_attn.k_norm.weight",
    }  # fmt: skip
    assert {n for n in other if not n[0].isdigit()} == {
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
    }


def test_an_engine_that_serves_fp8_gets_its_own_parameters() -> None:
    """Compares names and shapes of the scales with vLLM's block-FP8 layers."""
    names = quantised(layouts(EVEN)[1].tensors)
    shard = with_scales(layouts(EVEN)[1], names).shards[0]
    scales = {name: shape for name, shape in shard.params.items() if SUFFIX in name and "layers.0" in name}
    assert scales == {
        "model.layers.0.self_attn.qkv_proj.weight_scale_inv": (8, 2),
        "model.layers.0.self_attn.o_proj.weight_scale_inv": (2, 4),
        "model.layers.0.mlp.experts.routed_experts.w13_weight_scale_inv": (4, 4, 2),
        "model.layers.0.mlp.experts.routed_experts.w2_weight_scale_inv": (4, 2, 2),
    }


def test_the_wire_carries_half() -> None:
    names = quantised(layouts(EVEN)[1].tensors)
    wire = Wire(torch.bfloat16, names)
    source, target = layouts(EVEN)
    plain = plan(source, target).bytes_in[0]
    small = plan(with_scales(source, names), with_scales(target, names), itemsize=wire.itemsize).bytes_in[0]
    linear = sum(math.prod(target.tensors[name]) for name in names)
    scales = sum(math.prod(with_scales(target, names).tensors[name + SUFFIX]) for name in names)
    assert plain - small == linear - 4 * scales and scales < linear / 8000


def test_straddled_blocks_are_found() -> None:
    source, _ = layouts(ODD)
    boundaries = straddled(source, quantised(source.tensors))
    # Each rank holds 96 of 192 rows (or columns): block 0 is cut at 96. A head's rows: 128 of q, 64 of k and v.
    assert boundaries["model.layers.0.mlp.experts.0.gate_proj.weight"].tolist() == [[0, 0], [0, 1]]
    assert boundaries["model.layers.0.mlp.experts.0.down_proj.weight"].tolist() == [[0, 0], [1, 0]]
    assert boundaries["model.layers.1.self_attn.k_proj.weight"].tolist() == [[0, 0], [0, 1]]
    even = straddled(architecture(EVEN).megatron_layout(EVEN, ParallelDims(), "local"), quantised(source.tensors))
    assert not even


def test_a_straddled_block_needs_agreement() -> None:
    from skyrl_mega.weights.fp8.scales import Scales

    source, _ = layouts(ODD)
    names = quantised(source.tensors)
    with pytest.raises(ValueError, match=r"proj.*must agree"):
        Scales(with_scales(source, names), 0, names, names, None, torch.device("cpu"))
