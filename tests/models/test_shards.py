"""Tests of local tensors against torch operations on whole tensors, and against a real Megatron model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor
from torch.distributed import TCPStore

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import PolicyConfig
from skyrl_mega.megatron import cpu
from skyrl_mega.megatron import model as build
from skyrl_mega.models.registry import architecture
from skyrl_mega.parallel.box import Shard
from skyrl_mega.parallel.dims import ParallelDims
from tests.support.ranks import run_ranks
from tests.weights.grids import LAYOUTS, MODELS, cut, global_tensors, pairs

CPU = torch.device("cpu")


@pytest.mark.parametrize("hf, parallel", pairs())
@pytest.mark.parametrize("spec", ["local", "te"])
def test_every_local_element_is_covered_once_but_padding(hf: dict[str, Any], parallel: ParallelDims, spec: Any) -> None:
    arch = architecture(hf)
    shards = arch.megatron_layout(hf, parallel, spec).shards
    check_cover(shards, hf["vocab_size"], hf["hidden_size"], arch.padded_vocab(hf, parallel.tensor), parallel.tensor)


@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("model", MODELS)
def test_every_engine_element_is_covered_once_but_padding(model: str, tensor: int, expert_parallel: bool) -> None:
    hf = MODELS[model]
    shards = architecture(hf).engine_layout(hf, tensor, expert_parallel=expert_parallel).shards
    check_cover(shards, hf["vocab_size"], hf["hidden_size"], 128, tensor)


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("tensor, data", [(1, 2), (2, 2), (1, 3), (1, 4)])
def test_data_parallel_engines_share_their_experts(tensor: int, data: int, experts: bool) -> None:
    """Compares data-parallel engines: experts as in an engine of tensor · data workers, all other tensors per
    replica."""
    hf = MODELS["qwen3_moe"]
    arch = architecture(hf)
    if not experts and data == 3:
        with pytest.raises(UserError, match="3 workers do not divide the model's 64 columns of an expert"):
            arch.check_engine(hf, tensor, experts, data=data)
        return
    layout = arch.engine_layout(hf, tensor, 2, experts, data)
    whole = global_tensors(layout.tensors)
    assert len(layout.shards) == 2 * tensor * data and len(layout.distinct[0]) == tensor * data
    alone = arch.engine_layout(hf, tensor)
    for rank, shard in enumerate(layout.shards[: tensor * data]):
        assert shard == arch.engine_shard(hf, tensor, rank, experts, data)
        local, replica = cut(shard, whole), cut(alone.shards[rank % tensor], whole)
        for name, value in local.items():
            if ".experts." not in name:
                assert torch.equal(value.nan_to_num(), replica[name].nan_to_num())
        for i in range(4):
            gate, up, down = (
                torch.stack([whole[f"model.layers.{i}.mlp.experts.{e}.{x}_proj.weight"] for e in range(8)])
                for x in ("gate", "up", "down")
            )
            if experts:
                mine = np.array_split(np.arange(8), tensor * data)[rank]
                gate, up, down = gate[mine], up[mine], down[mine]
            else:
                gate, up = (x.chunk(tensor * data, 1)[rank] for x in (gate, up))
                down = down.chunk(tensor * data, 2)[rank]
            at = f"model.layers.{i}.mlp.experts.routed_experts"
            assert torch.equal(local[f"{at}.w13_weight"], torch.cat([gate, up], 1))
            assert torch.equal(local[f"{at}.w2_weight"], down)


def test_experts_are_dealt_as_vllm_deals_them() -> None:
    manager = pytest.importorskip("vllm.model_executor.layers.fused_moe.expert_map_manager")
    hf = MODELS["qwen3_moe"]
    for tensor, data in ((1, 3), (2, 2), (1, 5)):
        layout = architecture(hf).engine_layout(hf, tensor, 1, True, data)
        for rank, shard in enumerate(layout.shards):
            count, places, _ = manager.determine_expert_map(tensor * data, rank, 8)
            experts_of = {
                (int(p.tensor.split(".experts.")[1].split(".")[0]), p.offset[0])
                for p in shard.pieces
                if ".experts." in p.tensor
            }
            assert experts_of == {(expert, int(place)) for expert, place in enumerate(places) if place >= 0}
            assert len(experts_of) == count


def check_cover(shards: tuple[Shard, ...], vocab: int, hidden: int, padded: int, tensor: int) -> None:
    for shard in shards:
        count = {name: np.zeros(shape, int) for name, shape in shard.params.items()}
        for piece in shard.pieces:
            stack = len(piece.offset) - len(piece.box.shape)
            inner = [slice(o, o + n) for o, n in zip(piece.offset[stack:], piece.box.shape, strict=True)]
            count[piece.param][(*piece.offset[:stack], *inner)] += 1
        for name, times in count.items():
            assert times.max() <= 1
            if not ("embed" in name or "output_layer" in name or "lm_head" in name):
                assert times.min() == 1, name
            else:
                assert times.shape == (padded // tensor, hidden)
                assert (times.min(1) == times.max(1)).all()
    for name in ("0.embedding.word_embeddings.weight", "model.embed_tokens.weight"):
        rows = [shard.params[name][0] for shard in shards[:tensor] if name in shard.params]
        if rows:
            covered = sum(p.box.shape[0] for shard in shards[:tensor] for p in shard.pieces if p.param == name)
            assert sum(rows) == padded and covered == vocab


@pytest.mark.parametrize(
    "sizes, expected",
    [
        ({"pipeline": 2, "first_stage_layers": 5}, [[range(0, 5)], [range(5, 8)]]),
        ({"pipeline": 2, "last_stage_layers": 5}, [[range(0, 3)], [range(3, 8)]]),
        ({"pipeline": 4, "first_stage_layers": 1}, None),
        ({"pipeline": 4, "first_stage_layers": 1, "last_stage_layers": 3}, [[range(0, 1)], [range(1, 3)], ...]),
        ({"pipeline": 2, "first_stage_layers": 5, "last_stage_layers": 2}, None),
        (
            {"pipeline": 2, "virtual_pipeline": 2, "first_stage_layers": 2},
            [[range(0, 1), range(4, 5)], [range(1, 4), range(5, 8)]],
        ),
        (
            {"pipeline": 3, "virtual_pipeline": 2, "first_stage_layers": 2, "last_stage_layers": 2},
            [[range(0, 1), range(4, 5)], [range(1, 3), range(5, 7)], [range(3, 4), range(7, 8)]],
        ),
    ],
)
def test_uneven_pipelines(sizes: dict[str, int], expected: list[Any] | None) -> None:
    """Compares layers by stage and chunk of an 8-layer model with a written list, and with megatron-core's
    numbering."""
    grid = ParallelDims(sizes["pipeline"], **sizes)
    hf = {**MODELS["qwen3"], "num_hidden_layers": 8}
    if expected is None:
        with pytest.raises(UserError, match=r"policy\.layout\.first_stage_layers: .* do not fit the model's 8 layers"):
            architecture(hf).check_layout(hf, grid)
        return
    architecture(hf).check_layout(hf, grid)
    config = build.transformer_config(hf, PolicyConfig(), grid, torch.float32, CPU)
    for stage in range(grid.pipeline):
        chunks = [grid.stage_layers(8, stage, chunk) for chunk in range(grid.virtual_pipeline)]
        if ... not in expected:
            assert chunks == expected[stage]
        for chunk, layers in enumerate(chunks):
            vp = chunk if grid.virtual_pipeline > 1 else None
            assert get_transformer_layer_offset(config, vp, stage) == layers.start
            assert get_num_layers_to_build(config, vp, stage) == len(layers)


def test_uneven_pipelines_need_stages_and_whole_chunks() -> None:
    with pytest.raises(UserError, match=r"first_stage_layers: 3 needs policy\.layout\.pipeline of at least 2"):
        ParallelDims(first_stage_layers=3)
    with pytest.raises(
        UserError, match=r"last_stage_layers: 3 is not a multiple of policy\.layout\.virtual_pipeline 2"
    ):
        ParallelDims(2, pipeline=2, virtual_pipeline=2, last_stage_layers=3)


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("spec", ["local", "te"])
@pytest.mark.parametrize("model", MODELS)
def test_megatron_definitions(model: str, tensor: int, spec: Any) -> None:
    """Compares qkv by query group, gate over up, columns of row-parallel layers; expected values are reshaped whole
    tensors."""
    hf = MODELS[model]
    arch = architecture(hf)
    decoder = arch.describe(hf)
    grid = (
        ParallelDims(2, tensor=tensor, expert=2)
        if decoder.experts
        else ParallelDims(2, tensor=tensor, expert_tensor=tensor)
    )
    layout = arch.megatron_layout(hf, grid, spec)
    whole = global_tensors(layout.tensors)
    groups, per, width = decoder.kv_heads, decoder.facts["heads"] // decoder.kv_heads, decoder.facts["head_dim"]
    for rank, shard in enumerate(layout.shards):
        local = cut(shard, whole)
        tp = rank % tensor
        for i in range(decoder.layers):
            local_layer, hf_layer = f"0.decoder.layers.{i}", f"model.layers.{i}"
            for kind in ["weight"] + ["bias"] * decoder.facts["qkv_bias"]:
                q, k, v = (whole[f"{hf_layer}.self_attn.{x}_proj.{kind}"] for x in "qkv")
                rest = q.shape[1:]
                parts = [q.view(groups, per * width, *rest), k.view(groups, width, *rest), v.view(groups, width, *rest)]
                fused = torch.cat(parts, dim=1).reshape(-1, *rest).chunk(tensor)[tp]
                assert torch.equal(local[f"{local_layer}.self_attention.linear_qkv.{kind}"], fused)
            o = whole[f"{hf_layer}.self_attn.o_proj.weight"]
            assert torch.equal(local[f"{local_layer}.self_attention.linear_proj.weight"], o.chunk(tensor, dim=1)[tp])
            norm = whole[f"{hf_layer}.post_attention_layernorm.weight"]
            if decoder.experts and decoder.is_moe(i):
                assert torch.equal(local[f"{local_layer}.pre_mlp_layernorm.weight"], norm)
                assert torch.equal(local[f"{local_layer}.mlp.router.weight"], whole[f"{hf_layer}.mlp.gate.weight"])
                half = decoder.experts.count // 2
                for e in range(half):
                    name = "linear_{}.weight" + str(e) if spec == "te" else f"local_experts.{e}.linear_{{}}.weight"
                    hf_expert = f"{hf_layer}.mlp.experts.{rank * half + e}"
                    check_gated(local, f"{local_layer}.mlp.experts.{name}", whole, hf_expert, 1, 0)
            else:
                fused_norm = "mlp.linear_fc1.layer_norm_weight" if spec == "te" else "pre_mlp_layernorm.weight"
                assert torch.equal(local[f"{local_layer}.{fused_norm}"], norm)
                check_gated(local, f"{local_layer}.mlp.linear_{{}}.weight", whole, f"{hf_layer}.mlp", tensor, tp)


def check_gated(local: dict[str, Tensor], name: str, whole: dict[str, Tensor], source: str, size: int, tp: int) -> None:
    gate, up, down = (whole[f"{source}.{x}_proj.weight"] for x in ("gate", "up", "down"))
    assert torch.equal(local[name.format("fc1")], torch.cat([gate.chunk(size)[tp], up.chunk(size)[tp]]))
    assert torch.equal(local[name.format("fc2")], down.chunk(size, dim=1)[tp])


@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("model", MODELS)
def test_engine_definitions(model: str, tensor: int) -> None:
    """Compares q, k, v in sequence with shared kv heads, gate over up, stacked experts."""
    hf = MODELS[model]
    arch = architecture(hf)
    decoder = arch.describe(hf)
    layout = arch.engine_layout(hf, tensor)
    whole = global_tensors(layout.tensors)
    copies = max(1, tensor // decoder.kv_heads)
    for rank, shard in enumerate(layout.shards):
        local = cut(shard, whole)
        for i in range(decoder.layers):
            at = f"model.layers.{i}"
            for kind in ["weight"] + ["bias"] * decoder.facts["qkv_bias"]:
                q, k, v = (whole[f"{at}.self_attn.{x}_proj.{kind}"] for x in "qkv")
                k, v = (
                    t.view(decoder.kv_heads, decoder.facts["head_dim"], -1)
                    .repeat_interleave(copies, 0)
                    .reshape(-1, *t.shape[1:])
                    for t in (k, v)
                )
                fused = torch.cat([t.chunk(tensor)[rank] for t in (q, k, v)])
                assert torch.equal(local[f"{at}.self_attn.qkv_proj.{kind}"], fused)
            if decoder.experts and decoder.is_moe(i):
                gate, up, down = (
                    torch.stack([whole[f"{at}.mlp.experts.{e}.{x}_proj.weight"] for e in range(decoder.experts.count)])
                    for x in ("gate", "up", "down")
                )
                w13 = torch.cat([gate.chunk(tensor, 1)[rank], up.chunk(tensor, 1)[rank]], 1)
                assert torch.equal(local[f"{at}.mlp.experts.routed_experts.w13_weight"], w13)
                assert torch.equal(local[f"{at}.mlp.experts.routed_experts.w2_weight"], down.chunk(tensor, 2)[rank])
            else:
                gate, up, down = (whole[f"{at}.mlp.{x}_proj.weight"] for x in ("gate", "up", "down"))
                fused = torch.cat([gate.chunk(tensor)[rank], up.chunk(tensor)[rank]])
                assert torch.equal(local[f"{at}.mlp.gate_up_proj.weight"], fused)
                assert torch.equal(local[f"{at}.mlp.down_proj.weight"], down.chunk(tensor, 1)[rank])


def megatron_params(rank: int, address: str, hf: dict[str, Any], parallel: ParallelDims) -> dict[str, tuple[int, ...]]:
    """Returns names and shapes of a real GPTModel's parameters on this rank."""
    host, port = address.split(":")
    store = TCPStore(host, int(port), is_master=rank == 0, wait_for_workers=False)
    cpu.stand_in()
    build.join(rank, parallel, store, CPU, 120)
    chunks = build.build_model(hf, PolicyConfig(), parallel, torch.float32, CPU)
    return {f"{i}.{name}": tuple(p.shape) for i, chunk in enumerate(chunks) for name, p in chunk.named_parameters()}


@pytest.mark.parametrize(
    "model, layout",
    [
        ("qwen3_moe", "tp2 pp2 ep2"),
        ("qwen3_moe", "tp2"),
        ("qwen3_moe_mixed", "tp2 ep2 etp2"),
        ("qwen3", "pp2"),
        ("qwen2_tied", "pp2 vpp2"),
        ("qwen2_tied", "one"),
        ("llama", "tp2"),
    ],
)
def test_a_real_megatron_model_has_these_parameters(model: str, layout: str) -> None:
    hf, parallel = MODELS[model], LAYOUTS[layout]
    arch = architecture(hf)
    actual = run_ranks(parallel.ranks, megatron_params, hf, parallel)
    assert actual == [dict(arch.megatron_shard(hf, parallel, r, "local").params) for r in range(parallel.ranks)]


@pytest.mark.parametrize(
    "model, sizes, words",
    [
        ("qwen3", {"tensor": 3}, ["policy.layout.tensor", "3", "4 attention heads"]),
        ("qwen3", {"tensor": 4}, ["policy.layout.tensor", "4", "2 key/value heads"]),
        ("qwen3", {"pipeline": 3}, ["policy.layout.pipeline", "3", "4 layers"]),
        ("qwen3", {"pipeline": 2, "virtual_pipeline": 4}, ["virtual_pipeline", "4 layers"]),
        ("qwen3", {"expert": 2}, ["policy.layout.expert", "experts"]),
        ("qwen3_moe", {"expert": 3}, ["policy.layout.expert", "3", "8 experts"]),
        ("qwen3_moe", {"expert_tensor": 3}, ["policy.layout.expert_tensor", "64 columns"]),
        ("qwen3_moe", {"tensor": 2, "expert_tensor": 1}, ["policy.layout.expert_tensor", "trains wrong"]),
    ],
)
def test_layouts_that_do_not_fit_are_refused(model: str, sizes: dict[str, int], words: list[str]) -> None:
    hf = MODELS[model]
    with pytest.raises(UserError) as error:
        architecture(hf).check_layout(hf, ParallelDims(ranks=24, **sizes))
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    "model, tensor, words",
    [
        ("qwen3", 3, ["rollout.tensor", "3", "2 key/value heads"]),
        ("llama", 8, ["rollout.tensor", "8", "4 attention heads"]),
        ("qwen3_moe", 16, ["rollout.tensor", "16", "8 experts"]),
    ],
)
def test_engines_that_do_not_fit_are_refused(model: str, tensor: int, words: list[str]) -> None:
    hf = MODELS[model]
    with pytest.raises(UserError) as error:
        architecture(hf).check_engine(hf, tensor)
    for word in words:
        assert word in str(error.value)
