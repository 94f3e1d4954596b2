"""Tests of keys missing in a config.json: same defaults as transformers' classes, and so as vLLM."""

from __future__ import annotations

from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers import AutoConfig

from skyrl_mega.common.errors import UserError
from skyrl_mega.models.decoder import Decoder
from skyrl_mega.models.registry import ARCHITECTURES, architecture

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
        "head_dim": decoder.head_dim,
        "max_length": decoder.max_length,
        "eps": decoder.norm_eps,
        "tied": decoder.tied,
        "rope": (attention.rope.base, attention.rope.scaling),
        "moe": [decoder.is_moe(layer) for layer in range(decoder.layers)],
        "renormalize": experts.router.renormalize if experts else None,
    }


def theirs(model_type: str, hf: dict[str, Any]) -> dict[str, Any]:
    c = AutoConfig.for_model(**hf)
    moe = model_type == "qwen3_moe"
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
            moe and i not in c.mlp_only_layers and (i + 1) % c.decoder_sparse_step == 0
            for i in range(c.num_hidden_layers)
        ],
        "renormalize": c.norm_topk_prob if moe else None,
    }


@pytest.mark.parametrize("model_type", ARCHITECTURES)
@pytest.mark.parametrize("key", [*OPTIONAL, "none of them"])
@pytest.mark.parametrize("how", ["absent", "null", "given"])
def test_as_in_transformers(model_type: str, key: str, how: str) -> None:
    hf = {"model_type": model_type, **GIVEN, **(GIVENS if how == "given" else {"num_key_value_heads": 8})}
    if how == "absent":
        hf = {"model_type": model_type, **GIVEN} if key == "none of them" else {k: hf[k] for k in hf if k != key}
    elif how == "null":
        hf |= {} if key == "none of them" else {key: None}
    try:
        expected = theirs(model_type, hf)
        taken = None not in expected["rope"]
    except StrictDataclassFieldValidationError:
        taken = False
    if not taken:
        with pytest.raises(UserError, match=f"config[.]json: {key} is null"):
            architecture(hf).describe(hf)
        return
    assert ours(architecture(hf).describe(hf)) == expected
