"""Tests of keys missing in a config.json: same defaults as transformers' classes, and so as vLLM."""

from __future__ import annotations

from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers import CONFIG_MAPPING, AutoConfig

from skyrl_mega.common.errors import UserError
from skyrl_mega.models.decoder import Decoder
from skyrl_mega.models.registry import ARCHITECTURES, architecture

GROUPED = [
    name
    for name in ARCHITECTURES
    if name in CONFIG_MAPPING and name != "gpt_oss"
    if not {"kv_lora_rank", "text_config"} & {*CONFIG_MAPPING[name].__dataclass_fields__}
]
"""Families with grouped-query attention; `test_latent` has the keys of latent attention, `test_gpt_oss` its own, and a
family with `text_config` those of its text model."""
GIVEN = {
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 128,
    "vocab_size": 100,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
OTHERS: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"shared_expert_intermediate_size": 48},
    "qwen3_next": {"shared_expert_intermediate_size": 48},
    "qwen3_5_moe_text": {"shared_expert_intermediate_size": 48},
    "mixtral": {"num_local_experts": 8},
    "olmoe": {"norm_topk_prob": False},
    "glm4_moe": {"n_routed_experts": 8, "head_dim": 64},
    "minimax_m2": {
        "head_dim": 64,
        "rotary_dim": 32,
        "num_local_experts": 8,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
    },
}
"""Further keys without a default, and values that vLLM requires."""
READ_BY_VLLM = {("glm4_moe", "head_dim"), ("minimax_m2", "head_dim")}
"""Keys with a default in transformers and none in vLLM."""
FALSE_TO_VLLM = {("qwen3_5_moe_text", "norm_topk_prob")}
"""Keys for which vLLM takes null as False, and transformers as the default."""
OPTIONAL = (
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
    "head_dim",
    "tie_word_embeddings",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "decoder_sparse_step",
    "mlp_only_layers",
    "norm_topk_prob",
)
GIVENS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "head_dim": 64,
    "tie_word_embeddings": True,
    "rope_theta": 5e5,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [0],
    "norm_topk_prob": True,
}
"""Values different from every default. So a given key has a visible effect."""


def ours(decoder: Decoder) -> dict[str, Any]:
    attention = next(block for block in decoder.blocks if hasattr(block, "rope"))
    experts = decoder.experts
    return {
        "kv_heads": decoder.kv_heads,
        "head_dim": decoder.facts.get("head_dim", 0),
        "max_length": decoder.max_length,
        "eps": decoder.norm_eps,
        "tied": decoder.tied,
        "rope": (attention.rope.base, attention.rope.scaling),
        "moe": [decoder.is_moe(layer) for layer in range(decoder.layers)],
        "renormalize": experts.router.renormalize if experts else None,
    }


def theirs(model_type: str, hf: dict[str, Any]) -> dict[str, Any]:
    c = AutoConfig.for_model(**hf)
    moe = bool(ARCHITECTURES[model_type].small)

    def read(name: str, default: Any) -> Any:
        return getattr(c, name) if name in type(c).__dataclass_fields__ else default

    listed, step = read("mlp_only_layers", ()), read("decoder_sparse_step", 1)
    dense_first = read("first_k_dense_replace", 0)
    rope = c.rope_parameters
    return {
        "kv_heads": c.num_key_value_heads,
        # As in the attention layers of transformers and vLLM.
        "head_dim": getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads,
        "max_length": c.max_position_embeddings,
        "eps": c.rms_norm_eps,
        "tied": c.tie_word_embeddings,
        "rope": (rope["rope_theta"], rope["rope_type"].replace("default", "none")),
        "moe": [
            moe and i not in listed and (i + 1) % step == 0 and i >= dense_first for i in range(c.num_hidden_layers)
        ],
        "renormalize": read("norm_topk_prob", True) if moe else None,
    }


@pytest.mark.parametrize("model_type", GROUPED)
@pytest.mark.parametrize("key", [*OPTIONAL, "none of them"])
@pytest.mark.parametrize("how", ["absent", "null", "given"])
def test_as_in_transformers(model_type: str, key: str, how: str) -> None:
    hf = {
        "model_type": model_type,
        **GIVEN,
        **OTHERS.get(model_type, {}),
        **(GIVENS if how == "given" else {"num_key_value_heads": 8}),
    }
    if how == "absent":
        hf = {"model_type": model_type, **GIVEN} if key == "none of them" else {k: hf[k] for k in hf if k != key}
    elif how == "null":
        hf |= {} if key == "none of them" else {key: None}
    hf |= {k: v for k, v in OTHERS.get(model_type, {}).items() if (how, k) not in (("absent", key), ("null", key))}
    try:
        expected = theirs(model_type, hf)
        taken = None not in expected["rope"] and expected["kv_heads"] is not None
    except StrictDataclassFieldValidationError:
        taken = False
    if (
        (how == "null" and (model_type, key) in FALSE_TO_VLLM)
        or not taken
        or (how in ("absent", "null") and (model_type, key) in READ_BY_VLLM)
    ):
        with pytest.raises(UserError, match=f"config[.]json: {key} is (null|missing)"):
            architecture(hf).describe(hf)
        return
    assert ours(architecture(hf).describe(hf)) == expected
