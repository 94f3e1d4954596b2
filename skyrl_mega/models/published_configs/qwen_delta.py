"""The config.json of Qwen3-Next, whose layers have gated delta nets."""

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

MODELS: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-Next-80B-A3B-Instruct": _NEXT_80B,
    "Qwen/Qwen3-Next-80B-A3B-Thinking": _NEXT_80B,
}
"""Name on the Hugging Face hub → config.json."""
