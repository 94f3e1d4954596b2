"""The config.json of Mixtral, OLMoE and MiniMax-M2.

MiniMax-M2's file on the hub also contains `quantization_config`, because the weights are stored in FP8. The key
describes the files, not the model, and is left out here.
"""

from __future__ import annotations

from typing import Any

from skyrl_mega.models.published_configs.sizes import sizes

_COMMON = {"hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
_MIXTRAL_8X7B = (
    _COMMON
    | sizes(32, 4096, 14336, 32, 8)
    | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "vocab_size": 32000,
        "max_position_embeddings": 32768,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
)
_OLMOE_1B_7B = (
    _COMMON
    | sizes(16, 2048, 1024, 16, 16)
    | {
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "attention_bias": False,
        "clip_qkv": None,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "vocab_size": 50304,
        "max_position_embeddings": 4096,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "eos_token_id": 50279,
        "pad_token_id": 1,
    }
)
_MINIMAX_M2 = (
    _COMMON
    | sizes(62, 3072, 1536, 48, 8)
    | {
        "architectures": ["MiniMaxM2ForCausalLM"],
        "model_type": "minimax_m2",
        "rms_norm_eps": 1e-6,
        "rope_theta": 5000000,
        "head_dim": 128,
        "rotary_dim": 64,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "vocab_size": 200064,
        "max_position_embeddings": 196608,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_mtp": True,
        "num_mtp_modules": 3,
        "eos_token_id": 200020,
    }
)

MODELS: dict[str, dict[str, Any]] = {
    "mistralai/Mixtral-8x7B-v0.1": _MIXTRAL_8X7B,
    "mistralai/Mixtral-8x7B-Instruct-v0.1": _MIXTRAL_8X7B,
    "allenai/OLMoE-1B-7B-0924": _OLMOE_1B_7B,
    "allenai/OLMoE-1B-7B-0924-Instruct": _OLMOE_1B_7B,
    "MiniMaxAI/MiniMax-M2": _MINIMAX_M2,
}
"""Name on the Hugging Face hub → config.json."""
