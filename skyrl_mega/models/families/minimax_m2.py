"""MiniMax-M2: RMSNorm over all heads, partial rotary positions, sigmoid routing with a correction bias."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from skyrl_mega.models.blocks.experts import ExpertNames, Experts
from skyrl_mega.models.blocks.gqa import GroupedQueryAttention
from skyrl_mega.models.blocks.routing import ExpertRouter
from skyrl_mega.models.config_json import Hf, integer, require, require_given, with_defaults
from skyrl_mega.models.decoder import Decoder, read_decoder

NAMES = ExpertNames("block_sparse_moe", "block_sparse_moe.e_score_correction_bias", ("w1", "w3", "w2"))
"""Names as in Mixtral."""

CLASS = "MiniMaxM2ForCausalLM"
"""The transformers class, by which vLLM selects the model."""


def describe(hf: Hf) -> Decoder:
    """Returns the layers and sizes of a MiniMax-M2 model from its config.json.

    Raises:
        UserError: A key is missing, or a value is not supported.
    """
    hf = with_defaults(
        hf,
        max_position_embeddings=196608,
        num_key_value_heads=8,
        rope_theta=5_000_000.0,
        use_qk_norm=True,
    )
    require_given(hf, "scoring_func", "sigmoid")
    require_given(hf, "use_routing_bias", True)
    integer(hf, "head_dim")
    require(hf, "use_qk_norm", True)
    require(hf, "qk_norm_type", "per_layer")
    require(hf, "router_jitter_noise", 0.0)
    part = integer(hf, "rotary_dim") / integer(hf, "head_dim")
    integer(hf, "num_key_value_heads")  # null is refused by the transformers class
    attention = GroupedQueryAttention.read(hf, qk_norm="all_heads", qkv_bias=False, part=part)
    router = ExpertRouter("sigmoid", renormalize=True, bias=True)
    experts = Experts.read(
        hf,
        router,
        names=NAMES,
        engine_float32_router=True,
        count=("num_local_experts",),
        width="intermediate_size",
    )
    layer = (replace(attention, engine_norm_rows=True), experts)
    return read_decoder(hf, [layer] * integer(hf, "num_hidden_layers"), engine_ties=False)


def small(hf: dict[str, Any]) -> dict[str, Any]:
    """Returns the config.json of a small model of this family, from a config.json with the common keys and Qwen3-MoE's
    keys for the sizes of experts. `hf` stays unchanged. Raises KeyError if `num_experts`, `moe_intermediate_size` or
    `head_dim` is missing; other keys are not checked."""
    renamed = ("num_experts", "moe_intermediate_size", "attention_bias")
    own = {
        "num_local_experts": hf["num_experts"],
        "intermediate_size": hf["moe_intermediate_size"],
        "rotary_dim": hf["head_dim"] // 2,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
    }
    return {key: value for key, value in hf.items() if key not in renamed} | own
