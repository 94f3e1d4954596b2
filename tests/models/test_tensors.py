"""Tests of names and shapes on disk against transformers' `save_pretrained`, and against Qwen3-30B-A3B's published
index."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import BuildConfig
from skyrl_mega.models.registry import ARCHITECTURES, architecture
from skyrl_mega.models.tiny import hf_config
from tests.weights.grids import MODELS

OF_LARGER_MODELS = ("qwen3_5_moe",)
"""Families of files with more than the text model (tests/families/test_vision_files.py)."""
IN_TRANSFORMERS = [name for name in ARCHITECTURES if name in CONFIG_MAPPING and name not in OF_LARGER_MODELS]
"""All but Kimi-K2, whose class is part of the published files."""
SMALL = MODELS | {
    name: hf_config(BuildConfig(architecture=name, layers=3, head_dim=16))
    for name in IN_TRANSFORMERS
    if name not in MODELS and ARCHITECTURES[name].small
}
"""A model of every family."""


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model", SMALL)
def test_save_pretrained_writes_these_tensors(model: str, tied: bool, tmp_path: Path) -> None:
    given = {**SMALL[model], "tie_word_embeddings": tied}
    config = AutoConfig.for_model(**given)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as saved:
        saved_shapes = {name: tuple(saved.get_slice(name).get_shape()) for name in saved.keys()}  # noqa: SIM118
    written = json.loads((tmp_path / "config.json").read_text())
    for hf in (given, written):
        assert architecture(hf).disk_tensors(hf) == saved_shapes
    # transformers 5 writes keys different from the keys it reads; both describe the same model.
    assert architecture(written).describe(written) == architecture(given).describe(given)


@pytest.mark.parametrize(
    ("model", "changes", "words"),
    [
        ("olmoe", {"sliding_window": 8}, "sliding_window is 8"),
        ("glm4_moe", {"sliding_window": 8}, "sliding_window is 8"),
        ("deepseek_v3", {"sliding_window": 8}, "sliding_window is 8"),
        ("minimax_m2", {"rotary_dim": None}, "rotary_dim is null"),
        ("qwen2_moe", {"num_experts": None, "num_local_experts": 8}, "num_experts is null"),
        ("qwen3_moe", {"dual_chunk_attention_config": {"chunk_size": 8}}, "dual_chunk_attention_config is"),
        ("glm4_moe", {"rope_theta": 10**400}, "rope_theta is"),
    ],
)
def test_what_an_engine_alone_would_read_is_refused(model: str, changes: dict[str, Any], words: str) -> None:
    hf = SMALL[model] | changes
    with pytest.raises(UserError, match=words):
        architecture(hf).describe(hf)


@pytest.mark.parametrize("name", IN_TRANSFORMERS)
def test_absent_keys_mean_what_transformers_takes_them_for(name: str) -> None:
    bare: dict[str, Any] = {
        "model_type": name, "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    if small := ARCHITECTURES[name].small:
        bare |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
        unread = ("partial_rotary_factor", "rms_norm_eps", "num_nextn_predict_layers")
        bare = {key: value for key, value in small(bare).items() if key not in unread}
    if name == "qwen3":
        bare["head_dim"] = 128
    if name in ("llama", "qwen2"):
        bare["head_dim"] = 8
    full = AutoConfig.for_model(**bare).to_dict()
    needed = ("glm4_moe", "minimax_m2")  # vLLM reads their head_dim
    other = ("qwen3_next", "qwen3_5_moe_text", "gpt_oss")  # their default is 256, or 64
    short = {key: value for key, value in bare.items() if key != "head_dim" or name in needed + other}
    assert architecture(short).describe(short) == architecture(full).describe(full)


def test_qwen3_30b(real_data: Path) -> None:
    folder = real_data / "data/qwen3_30b_a3b"
    hf = json.loads((folder / "config.json").read_text())
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    tensors = architecture(hf).tensors(hf)
    assert len(tensors) == 18867
    assert tensors.keys() == index["weight_map"].keys()
    assert 2 * sum(map(prod, tensors.values())) == index["metadata"]["total_size"] == 61_064_245_248


@pytest.mark.parametrize(
    "model, changes, words",
    [
        ("qwen3", {"model_type": "gpt2"}, ["gpt2", "qwen2_moe, qwen3, "]),
        ("qwen3", {"model_type": None}, ["None", "qwen3_moe"]),
        ("qwen3", {"hidden_size": None}, ["hidden_size is null"]),
        ("qwen3", {"num_hidden_layers": "4"}, ["num_hidden_layers", "'4'", "positive integer"]),
        ("qwen3", {"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
        ("qwen3", {"attention_bias": True}, ["attention_bias is true"]),
        ("llama", {"mlp_bias": True}, ["mlp_bias"]),
        ("qwen2_tied", {"use_sliding_window": True}, ["use_sliding_window"]),
        ("qwen2_tied", {"head_dim": 32}, ["head_dim 32", "hidden_size 64", "give head_dim 16"]),
        ("llama", {"num_key_value_heads": 3}, ["num_key_value_heads", "3", "divisor"]),
        ("llama", {"quantization_config": {"bits": 4}}, ["quantization_config"]),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["rope_scaling", "yarn", "llama3"]),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["rope_scaling", "dynamic"]),
        (
            "llama",
            {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 2.0,
                                 "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}},
            ["rope_parameters", "low_freq_factor 1"],
        ),
        ("llama", {"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
        ("qwen3_moe", {"mlp_only_layers": [0, 1, 2, 3]}, ["experts", "qwen3"]),
        ("qwen3_moe", {"num_experts_per_tok": 9}, ["num_experts_per_tok 9", "8 experts"]),
    ],
)  # fmt: skip
def test_what_cannot_be_computed_is_refused(model: str, changes: dict[str, Any], words: list[str]) -> None:
    hf = {**MODELS[model], **changes}
    with pytest.raises(UserError) as error:
        architecture(hf).tensors(hf)
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)
