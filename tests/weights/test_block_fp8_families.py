"""Block-FP8 directories as DeepSeek, Moonshot and MiniMax publish them: each rank and each engine worker loads the
values of the formula, and a layer for multi-token prediction stays unread."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from skyrl_mega.hf_checkpoint.copied import unread_note
from skyrl_mega.hf_checkpoint.index import check_files, read_config, unread_tensors
from skyrl_mega.hf_checkpoint.load import load
from skyrl_mega.models.registry import architecture
from skyrl_mega.parallel.box import Layout, Shard
from tests.support.fp8_files import CORRECTION_BIAS, FP8, dequantised, prediction_layer, rewrite, same_bits
from tests.weights.grids import LAYOUTS, cut, empty, global_tensors

DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "vocab_size": 105,
    "hidden_size": 192,
    "intermediate_size": 320,
    "moe_intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "q_lora_rank": 160,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 40,
    "v_head_dim": 48,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 64,
}
"""A model whose cuts begin inside blocks of 128; the down-projection of keys and values has 512 + 64 rows, as in
DeepSeek-V3."""
MINIMAX: dict[str, Any] = {
    "model_type": "minimax_m2",
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "vocab_size": 105,
    "hidden_size": 192,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rotary_dim": 32,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
}
SOURCES = {
    "deepseek_v3": DEEPSEEK,
    "kimi_k2": DEEPSEEK | {"model_type": "kimi_k2", "n_group": 1, "topk_group": 1, "q_lora_rank": None},
    "minimax_m2": MINIMAX,
}
CASES = (
    *(("one", "local", torch.bfloat16), ("tp2", "te", torch.bfloat16)),
    *(("tp2 ep2", "local", torch.bfloat16), ("tp2 ep2", "local", torch.float32)),
)
"""Layouts of a policy, with the layer spec and the type of the weights."""
CUT_INSIDE = {
    "deepseek_v3": {"q_b_proj", "kv_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
    "kimi_k2": {"q_proj", "kv_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
    "minimax_m2": {"q_proj", "k_proj", "v_proj", "o_proj", "w1", "w2", "w3"},
}
"""Matrices with boxes that begin inside a block, by the last part of their names."""


@pytest.fixture(scope="module", params=SOURCES)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """Writes a directory in block FP8 with a prediction layer; returns the directory and all tensors of its files."""
    hf, folder = SOURCES[request.param], tmp_path_factory.mktemp(request.param)
    (folder / "plain").mkdir()
    (folder / "plain" / "config.json").write_text(json.dumps(hf))
    save_file(global_tensors(architecture(hf).tensors(hf)), folder / "plain" / "model.safetensors")
    return folder / "fp8", rewrite(folder / "plain", folder / "fp8", extra=prediction_layer(folder / "plain"))


def layouts(hf: dict[str, Any]) -> list[tuple[Layout, torch.dtype]]:
    """Returns the layouts of policies and of an engine, with the type of the weights."""
    kind = architecture(hf)
    policies = [(kind.megatron_layout(hf, LAYOUTS[grid], spec), dtype) for grid, spec, dtype in CASES]
    return [*policies, (kind.engine_layout(hf, 2), torch.bfloat16)]


def loaded(folder: Path, shard: Shard, dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns the local tensors of a shard, loaded from a directory; correction biases in float32."""
    in_float32 = {piece.param for piece in shard.pieces if piece.tensor.endswith(CORRECTION_BIAS)}
    params = {name: tensor.float() if name in in_float32 else tensor for name, tensor in empty(shard, dtype).items()}
    load(folder, shard, params)
    return {name: tensor.float() for name, tensor in params.items()}


def test_every_rank_and_worker_loads_the_values_of_the_formula(source: tuple[Path, dict[str, Tensor]]) -> None:
    """Compares bit by bit with matrices dequantised whole, element by element."""
    folder, tensors = source
    hf = read_config(folder)
    inside: set[str] = set()
    for layout, dtype in layouts(hf):
        whole = {name: tensor.float() for name, tensor in dequantised(tensors, dtype).items()}
        for shard in layout.distinct[0]:
            assert same_bits(loaded(folder, shard, dtype), cut(shard, whole))
            inside |= {piece.tensor.split(".")[-2] for piece in shard.pieces if any(n % 128 for n in piece.box.start)}
    matrices = {name.split(".")[-2] for name, tensor in tensors.items() if tensor.dtype == FP8}
    assert inside & matrices == CUT_INSIDE[hf["model_type"]]


def test_the_prediction_layer_stays_unread(source: tuple[Path, dict[str, Tensor]]) -> None:
    folder, tensors = source
    hf = read_config(folder)
    check_files(folder)
    extra = {name for name in tensors if name.startswith("model.layers.2.")}
    assert "model.layers.2.self_attn.o_proj.weight_scale_inv" in extra
    assert set(unread_tensors(folder, hf)) == extra
    note = unread_note(folder, hf)
    assert note is not None and f"{len(extra)} tensors" in note and "model.layers.2.*;" in note
