"""Small models, layouts and reference tensors for the tests of weight transfer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from skyrl_mega.config.schema import BuildConfig
from skyrl_mega.models.tiny import hf_config
from skyrl_mega.parallel.box import Layout, Shard
from skyrl_mega.parallel.dims import ParallelDims

MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": hf_config(BuildConfig(architecture="qwen3_moe", layers=4)),
    "qwen3_moe_mixed": {
        **hf_config(BuildConfig(architecture="qwen3_moe", layers=4)),
        "mlp_only_layers": [1],
        "tie_word_embeddings": True,
    },
    "qwen3": hf_config(BuildConfig(architecture="qwen3", layers=4)),
    "qwen2_tied": hf_config(BuildConfig(architecture="qwen2", layers=4, head_dim=16, tied=True)),
    "llama": {**hf_config(BuildConfig(architecture="llama", layers=4, kv_heads=4)), "vocab_size": 101},
}

_MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_act": "silu",
    "head_dim": 128,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}
_DENSE: dict[str, Any] = {"model_type": "qwen2", "hidden_act": "silu", "max_position_embeddings": 32768}

REAL: dict[str, dict[str, Any]] = {
    "30B": {
        **_MOE,
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
    },
    "235B": {
        **_MOE,
        "num_hidden_layers": 94,
        "hidden_size": 4096,
        "num_attention_heads": 64,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
    },
    "3B": {
        **_DENSE,
        "num_hidden_layers": 36,
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "intermediate_size": 11008,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "7B": {
        **_DENSE,
        "num_hidden_layers": 28,
        "hidden_size": 3584,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "vocab_size": 152064,
    },
}
"""The settings of Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen2.5-3B and Qwen2.5-7B from which tensor shapes follow."""

LAYOUTS: dict[str, ParallelDims] = {
    "one": ParallelDims(),
    "dp2": ParallelDims(2),
    "tp2": ParallelDims(2, tensor=2, expert_tensor=2),
    "pp2": ParallelDims(2, pipeline=2),
    "pp2 vpp2": ParallelDims(2, pipeline=2, virtual_pipeline=2),
    "pp4": ParallelDims(4, pipeline=4),
    "ep2": ParallelDims(2, expert=2),
    "tp2 ep2": ParallelDims(2, tensor=2, expert=2),
    "tp2 ep2 etp2": ParallelDims(4, tensor=2, expert=2, expert_tensor=2),
    "tp2 pp2 ep2": ParallelDims(4, tensor=2, pipeline=2, expert=2),
    "tp2 pp2 vpp2 ep4 dp2": ParallelDims(8, tensor=2, pipeline=2, virtual_pipeline=2, expert=4),
    "cp2 ep2": ParallelDims(4, context=2, expert=2),
    "pp3 of 1 2 1": ParallelDims(3, pipeline=3, first_stage_layers=1, last_stage_layers=1),
    "pp2 of 3 1 ep2": ParallelDims(4, pipeline=2, expert=2, first_stage_layers=3),
}


def pairs() -> list[Any]:
    """Returns pytest parameters for every model with every layout allowed for the model."""
    import pytest

    return [
        pytest.param(MODELS[m], LAYOUTS[p], id=f"{m}-{p}")
        for m in MODELS
        for p in LAYOUTS
        if "num_experts" in MODELS[m] or LAYOUTS[p].expert == 1
    ]


def global_tensors(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, Tensor]:
    """Returns random float32 tensors of these shapes."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def empty(shard: Shard, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Returns the local tensors of a shard full of NaN, so an element left unfilled shows."""
    return {name: torch.full(shape, float("nan"), dtype=dtype) for name, shape in shard.params.items()}


def cut(shard: Shard, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the local tensors of a shard, filled piece by piece from whole tensors by plain indexing."""
    params = empty(shard)
    for piece in shard.pieces:
        stack = len(piece.offset) - len(piece.box.shape)
        where = [*piece.offset[:stack]]
        where += [slice(o, o + n) for o, n in zip(piece.offset[stack:], piece.box.shape, strict=True)]
        params[piece.param][tuple(where)] = tensors[piece.tensor][piece.box.slices()]
    return params


def whole(layout: Layout) -> Layout:
    """Returns the layout of a single rank with every tensor in full."""
    from skyrl_mega.hf_checkpoint.load import _whole

    return Layout(layout.tensors, (_whole(layout, list(layout.tensors)),))
