"""The config.json of GLM-4.5 to 4.7 (arXiv:2508.06471) and GLM-4.7-Flash."""

from __future__ import annotations

from typing import Any

from skyrl_mega.models.published_configs.sizes import sizes

_GLM: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
    "torch_dtype": "bfloat16",
}
_GLM4_MOE = _GLM | {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "vocab_size": 151552,
    "max_position_embeddings": 131072,
    "attention_bias": True,
    "head_dim": 128,
    "partial_rotary_factor": 0.5,
    "num_experts_per_tok": 8,
    "eos_token_id": [151329, 151336, 151338],
    "pad_token_id": 151329,
}
_355B = (
    _GLM4_MOE
    | sizes(92, 5120, 12288, 96, 8)
    | {
        "moe_intermediate_size": 1536,
        "n_routed_experts": 160,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
        "use_qk_norm": True,
    }
)
_106B = (
    _GLM4_MOE
    | sizes(46, 4096, 10944, 96, 8)
    | {
        "moe_intermediate_size": 1408,
        "n_routed_experts": 128,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.0,
        "use_qk_norm": False,
    }
)
_FLASH = (
    _GLM
    | sizes(47, 2048, 10240, 20, 20)
    | {
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "model_type": "glm4_moe_lite",
        "vocab_size": 154880,
        "max_position_embeddings": 202752,
        "attention_bias": False,
        "partial_rotary_factor": 1.0,
        "q_lora_rank": 768,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "moe_intermediate_size": 1536,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.8,
        "topk_method": "noaux_tc",
        "eos_token_id": [154820, 154827, 154829],
        "pad_token_id": 154820,
    }
)
_LONG = {"max_position_embeddings": 202752}

MODELS: dict[str, dict[str, Any]] = {
    "zai-org/GLM-4.5": _355B,
    "zai-org/GLM-4.5-Air": _106B,
    "zai-org/GLM-4.6": _355B | _LONG,
    "zai-org/GLM-4.7": _355B | _LONG,
    "zai-org/GLM-4.7-Flash": _FLASH,
}
"""Name on the Hugging Face hub → config.json."""
