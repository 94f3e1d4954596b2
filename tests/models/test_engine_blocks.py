"""Tests for differences between vLLM's blocks of 128 × 128 and blocks of whole tensors: by hand, for published
models."""

from __future__ import annotations

from typing import Any

import pytest

from skyrl_mega.models import engine
from skyrl_mega.models.blocks.base import EngineCut
from skyrl_mega.models.decoder import Decoder
from skyrl_mega.models.published import known
from skyrl_mega.models.registry import architecture


def decoder(kind: str, hidden: int, heads: int, kv_heads: int, width: int, **more: Any) -> Decoder:
    hf = {
        "architectures": [{"qwen3_moe": "Qwen3MoeForCausalLM", "llama": "LlamaForCausalLM"}[kind]],
        "model_type": kind,
        "hidden_size": hidden,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": width,
        "vocab_size": 1024,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    } | more
    return architecture(hf).describe(hf)


EXPERTS = {
    "head_dim": 128,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
MOE = decoder("qwen3_moe", 2048, 32, 4, 6144, **EXPERTS)
LLAMA = decoder("llama", 2048, 32, 8, 8192, head_dim=64)
SMOL = decoder("llama", 576, 9, 3, 1536, head_dim=64)


@pytest.mark.parametrize(
    ("model", "cut", "lacking"),
    [
        (MOE, EngineCut(1), None),
        (MOE, EngineCut(2), None),
        (MOE, EngineCut(8), "96 columns of an expert"),
        (MOE, EngineCut(1, data=8), "96 columns of an expert"),  # experts treat all workers as a group
        (MOE, EngineCut(8, expert_parallel=True), None),  # each of 8 workers has a key/value head of 128 columns
        (LLAMA, EngineCut(4), None),
        (LLAMA, EngineCut(8), "64 key and value columns"),  # queries, keys and values together have 384 columns
        (SMOL, EngineCut(1), "576 query columns"),  # keys begin in the middle of a block of queries
    ],
)
def test_what_a_worker_has_that_is_no_multiple_of_a_block(model: Decoder, cut: EngineCut, lacking: str | None) -> None:
    assert engine.cut_blocks(model, cut, online=True) == lacking


def test_a_single_expert_of_a_worker_is_a_number() -> None:
    experts = list(MOE.layer(0))[-1]
    rows = [experts.engine_row(EngineCut(n, expert_parallel=True), 3)["experts"] for n in (64, 128)]
    assert rows == ["6-7", "3"]


def test_sizes_without_a_cut_through_blocks_are_ones_that_vllm_takes() -> None:
    assert engine.whole_sizes(MOE, EngineCut(8), online=True) == [1, 2], "3 and 6 do not divide the heads"
    assert engine.whole_sizes(SMOL, EngineCut(1), online=True) == []


def test_an_expert_that_a_worker_has_whole_begins_a_block() -> None:
    odd = decoder("qwen3_moe", 256, 2, 2, 256, **EXPERTS | {"moe_intermediate_size": 96})
    assert engine.cut_blocks(odd, EngineCut(1), online=True) is None
    assert engine.cut_blocks(odd, EngineCut(1)) == "96 columns of an expert", "an FP8 checkpoint's parameters"


@pytest.mark.parametrize(
    ("name", "whole"), [("DeepSeek-V3", True), ("Qwen3.5-397B-A17B", True), ("GLM-4.5-Air", False)]
)
@pytest.mark.parametrize(("data", "experts"), [(4, True), (1, True), (4, False)])
def test_replicas_hold_whole_shared_experts_where_vllm_keeps_them_so(
    name: str, whole: bool, data: int, experts: bool
) -> None:
    """Compares the shapes and the covered rows of worker 5 with those of vLLM's classes, one layer each."""
    hf = known(name)
    published = architecture(hf).describe(hf)
    layer = published.of_one_layer(next(kind for kind in published.kinds if published.experts in kind))
    assert layer.experts and layer.experts.shared
    shared, parts = layer.experts.shared, 1 if whole and data > 1 and experts else 8
    width, prefix = shared.width // parts, f"model.layers.0.{shared.name}"
    shard = engine.shard(layer, EngineCut(8, experts, data), 5)
    assert shard.params[f"{prefix}.gate_up_proj.weight"] == (2 * width, layer.hidden)
    assert shard.params[f"{prefix}.down_proj.weight"] == (layer.hidden, width)
    pieces = {piece.tensor.split(".")[-2]: piece.box for piece in shard.pieces if f".{shared.name}." in piece.tensor}
    first = 0 if parts == 1 else 5 * width
    assert (pieces["gate_proj"].start, pieces["gate_proj"].shape) == ((first, 0), (width, layer.hidden))
    assert (pieces["down_proj"].start, pieces["down_proj"].shape) == ((0, first), (layer.hidden, width))
