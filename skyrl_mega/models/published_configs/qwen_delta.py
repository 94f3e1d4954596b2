"""The config.json of Qwen3-Next and Qwen3.5, whose layers have gated delta nets."""

from __future__ import annotations

from typing import Any

from skyrl_mega.models.published_configs.sizes import sizes

_DELTA: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_NEXT_80B = (
    _DELTA
    | sizes(48, 2048, 5120, 16, 2)
    | {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "torch_dtype": "bfloat16",
        "rope_theta": 10000000.0,
        "partial_rotary_factor": 0.25,
        "vocab_size": 151936,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
)
_TEXT_35B = {
    key: value for key, value in (_DELTA | sizes(40, 2048, 0, 16, 2)).items() if key != "intermediate_size"
} | {
    "model_type": "qwen3_5_moe_text",
    "dtype": "bfloat16",
    "vocab_size": 248320,
    "eos_token_id": 248044,
    "attn_output_gate": True,
    "mamba_ssm_dtype": "float32",
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000.0,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
    },
}
_LARGE = {
    "num_attention_heads": 32,
    "linear_num_value_heads": 64,
    "moe_intermediate_size": 1024,
    "shared_expert_intermediate_size": 1024,
}
_TEXT_122B = _TEXT_35B | _LARGE | {"num_hidden_layers": 48, "hidden_size": 3072}
_TEXT_397B = _TEXT_35B | _LARGE | {"num_hidden_layers": 60, "hidden_size": 4096}
_TEXT_397B |= {"num_experts": 512, "num_experts_per_tok": 10}


def _with_vision(text: dict[str, Any]) -> dict[str, Any]:
    """Returns the config.json of a model with a vision tower, whose sizes are left out."""
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "tie_word_embeddings": False,
        "text_config": text,
        "vision_config": {"model_type": "qwen3_5_moe"},
    }


MODELS: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-Next-80B-A3B-Instruct": _NEXT_80B,
    "Qwen/Qwen3-Next-80B-A3B-Thinking": _NEXT_80B,
    "Qwen/Qwen3.5-35B-A3B": _with_vision(_TEXT_35B),
    "Qwen/Qwen3.5-35B-A3B-Base": _with_vision(_TEXT_35B),
    "Qwen/Qwen3.5-122B-A10B": _with_vision(_TEXT_122B),
    "Qwen/Qwen3.5-397B-A17B": _with_vision(_TEXT_397B),
}
"""Name on the Hugging Face hub → config.json."""
