"""gpt-oss: absent keys and refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from transformers import AutoConfig

from skyrl_mega.common.errors import UserError
from skyrl_mega.models.huggingface import tensors
from skyrl_mega.models.published import known
from skyrl_mega.models.registry import architecture
from tests.megatron.layouts import layout

HF = known("gpt-oss-20b")
ARCH = architecture(HF)
REQUIRED = {
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("num_local_experts", "num_experts_per_tok", "rope_scaling", "max_position_embeddings", "vocab_size"),
}


@pytest.mark.parametrize("key", [key for key in HF if key != "model_type"])
def test_an_absent_key_has_the_default_of_transformers_or_is_refused(key: str) -> None:
    short = {name: value for name, value in HF.items() if name != key}
    if key in REQUIRED:
        with pytest.raises(UserError, match=f"{key} is (missing|null)"):
            ARCH.describe(short)
        return
    assert ARCH.describe(short) == ARCH.describe(AutoConfig.for_model(**short).to_dict())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"swiglu_limit": 5.0}, "swiglu_limit is 5.0"),
        ({"swiglu_alpha": 1.0}, "swiglu_alpha is 1.0"),
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps is 1.0e-06"),
        ({"attention_bias": False}, "attention_bias is false"),
        ({"layer_types": ["full_attention"] * 24}, "layer_types is"),
        ({"num_experts": 16}, "num_experts is 16"),
        ({"num_experts_per_tok": 64}, "num_experts_per_tok 64 is above the 32 experts"),
        ({"intermediate_size": 2888, "quantization_config": {"quant_method": "mxfp4"}}, "intermediate_size is 2888"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, "quantization_config is"),
    ],
)
def test_what_an_engine_computes_otherwise_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        ARCH.describe(HF | changes)


def test_only_families_published_in_mxfp4_read_it() -> None:
    hf = known("Qwen3-30B-A3B") | {"quantization_config": {"quant_method": "mxfp4"}}
    with pytest.raises(UserError, match=r"quantization_config\.quant_method is"):
        architecture(hf).describe(hf)


def test_an_engine_has_at_most_as_many_workers_as_key_value_heads() -> None:
    with pytest.raises(UserError, match="16 is more than the model's 8 key/value heads"):
        ARCH.check_engine(HF, 16, True)
    ARCH.check_engine(HF, 8, True)


def test_experts_with_biases_are_not_split_by_columns() -> None:
    with pytest.raises(UserError, match=r"policy\.layout\.expert_tensor"):
        ARCH.check_layout(HF, layout(2, tensor=2))
    ARCH.check_layout(HF, layout(2, tensor=2, expert=2))
    with pytest.raises(UserError, match="7 workers do not divide"):
        ARCH.check_engine(HF, 7, True)


def test_tensors_in_another_order_keep_it_below_another_prefix() -> None:
    decoder = replace(ARCH.describe(HF), prefix="model.language_model")
    names = [name for name in tensors(decoder) if name.endswith(("gate_up_proj", "gate_up_proj_bias", "down_proj"))]
    assert {*decoder.disk_forms} == {*names} and names[0].startswith("model.language_model.layers.0.")
