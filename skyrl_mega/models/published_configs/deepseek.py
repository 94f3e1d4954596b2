"""The config.json of DeepSeek-V3 (arXiv:2412.19437), of models of the same architecture, and of DeepSeek-V2-Lite.

The files of DeepSeek-V3 and Kimi-K2 on the hub also contain `quantization_config`, because the weights are stored in
FP8. The key describes the files, not the model, and is left out here.
"""

from __future__ import annotations

from typing import Any

from skyrl_mega.models.published_configs.sizes import sizes

_YARN = {
    "type": "yarn",
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}
_DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_layer_freq": 1,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
}
_V3 = (
    _DEEPSEEK
    | sizes(61, 7168, 18432, 128, 128)
    | {
        "vocab_size": 129280,
        "max_position_embeddings": 163840,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "rope_scaling": _YARN,
        "q_lora_rank": 1536,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
        "num_nextn_predict_layers": 1,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
)
_KIMI_K2 = (
    _V3
    | sizes(61, 7168, 18432, 64, 64)
    | {
        "model_type": "kimi_k2",
        "vocab_size": 163840,
        "max_position_embeddings": 131072,
        "rope_theta": 50000.0,
        "rope_scaling": _YARN | {"factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0},
        "n_routed_experts": 384,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.827,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
        "bos_token_id": 163584,
        "eos_token_id": 163586,
    }
)
_MOONLIGHT = (
    _DEEPSEEK
    | sizes(27, 2048, 11264, 16, 16)
    | {
        "vocab_size": 163840,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "q_lora_rank": None,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.446,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
        "bos_token_id": 163584,
        "eos_token_id": 163585,
    }
)
_V2_LITE = (
    _DEEPSEEK
    | sizes(27, 2048, 10944, 16, 16)
    | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "vocab_size": 102400,
        "max_position_embeddings": 163840,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "rope_scaling": _YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        "q_lora_rank": None,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "scoring_func": "softmax",
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1,
        "bos_token_id": 100000,
        "eos_token_id": 100001,
    }
)

MODELS: dict[str, dict[str, Any]] = {
    "deepseek-ai/DeepSeek-V3": _V3,
    "deepseek-ai/DeepSeek-R1": _V3,
    "moonshotai/Kimi-K2-Instruct": _KIMI_K2,
    "moonshotai/Moonlight-16B-A3B": _MOONLIGHT,
    "moonshotai/Moonlight-16B-A3B-Instruct": _MOONLIGHT | {"eos_token_id": 163586},
    "deepseek-ai/DeepSeek-V2-Lite": _V2_LITE,
    "deepseek-ai/DeepSeek-V2-Lite-Chat": _V2_LITE,
}
"""Name on the Hugging Face hub → config.json."""
