"""gpt-oss (arXiv:2508.10925): sliding windows in every second layer, attention sinks, biases, clamped experts."""

from __future__ import annotations

from typing import Any

from skyrl_mega.models.blocks.fused_experts import FusedExperts
from skyrl_mega.models.blocks.gqa import GroupedQueryAttention
from skyrl_mega.models.config_json import Hf, integer, require, unsupported, with_defaults
from skyrl_mega.models.decoder import Decoder, read_decoder
from skyrl_mega.models.quantization import block_fp8

CLASS = "GptOssForCausalLM"
"""The transformers class, by which vLLM selects the model."""
EPS = 1e-5
"""The norms' epsilon, fixed in vLLM."""
WINDOWED, FULL = "sliding_attention", "full_attention"


def describe(hf: Hf) -> Decoder:
    """Returns the layers and sizes of a gpt-oss model from its config.json.

    Raises:
        UserError: A key is missing, or a value is not supported.
    """
    hf = with_defaults(hf, rms_norm_eps=EPS, rope_theta=150_000.0, sliding_window=128, head_dim=64)
    if hf["rms_norm_eps"] != EPS:
        raise unsupported(hf, "rms_norm_eps", f"{EPS}, which vLLM always uses for this model_type")
    if block_fp8(hf):
        raise unsupported(hf, "quantization_config", "quant_method mxfp4 for this model_type")
    require(hf, "attention_bias", True)
    integer(hf, "num_key_value_heads")  # null is refused by the transformers class
    kinds = [(WINDOWED, FULL)[index % 2] for index in range(integer(hf, "num_hidden_layers"))]
    if hf.get("layer_types") not in (None, kinds):
        raise unsupported(hf, "layer_types", f"{WINDOWED} and {FULL} in turn, which vLLM always uses")
    if hf.get("num_experts") not in (None, hf.get("num_local_experts")):  # the one that transformers would use
        raise unsupported(hf, "num_experts", "no value beside num_local_experts")
    experts, window = FusedExperts.of(hf), integer(hf, "sliding_window")
    layers = {kind: (_attention(hf, window if kind == WINDOWED else None), experts) for kind in (WINDOWED, FULL)}
    return read_decoder(
        hf, [layers[kind] for kind in kinds], engine_ties=False, mxfp4=True, engine_embedding="model.embedding.weight"
    )


def _attention(hf: Hf, window: int | None) -> GroupedQueryAttention:
    """Returns the attention of layers that see this many tokens, with the token itself; None: all tokens."""
    return GroupedQueryAttention.read(
        hf, qk_norm="none", qkv_bias=True, bias_key=None, sinks=True, output_bias=True, window=window, yarn=True
    )


def small(hf: dict[str, Any]) -> dict[str, Any]:
    """Returns the config.json of a small model of this family, from a config.json with the common keys and Qwen3-MoE's
    keys for the sizes of experts. `hf` stays unchanged. Raises KeyError if `num_experts`, `moe_intermediate_size` or
    `max_position_embeddings` is missing; other keys are not checked."""
    renamed = ("num_experts", "moe_intermediate_size", "rope_theta")
    own = {
        "num_local_experts": hf["num_experts"],
        "intermediate_size": hf["moe_intermediate_size"],
        "attention_bias": True,
        "rms_norm_eps": EPS,
        "sliding_window": 128,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150_000.0,
            "factor": 32.0,
            "original_max_position_embeddings": max(1, hf["max_position_embeddings"] // 32),
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
    }
    return {key: value for key, value in hf.items() if key not in renamed} | own
