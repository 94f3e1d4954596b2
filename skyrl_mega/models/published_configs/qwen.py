"""The config.json of Qwen1.5-MoE, Qwen2, Qwen2.5 and Qwen3."""

from __future__ import annotations

from typing import Any

from skyrl_mega.models.published_configs.sizes import sizes

_QWEN = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "torch_dtype": "bfloat16",
}
_QWEN2 = _QWEN | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
_QWEN3 = _QWEN | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128}
_QWEN3_MOE = _QWEN | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
_2_5_0_5B = _QWEN2 | sizes(24, 896, 4864, 14, 2) | {"tie_word_embeddings": True}
_2_5_1B = _QWEN2 | sizes(28, 1536, 8960, 12, 2) | {"tie_word_embeddings": True}
_2_5_3B = _QWEN2 | sizes(36, 2048, 11008, 16, 2) | {"tie_word_embeddings": True}
_2_5_7B = _QWEN2 | sizes(28, 3584, 18944, 28, 4) | {"vocab_size": 152064}
_2_5_14B = _QWEN2 | sizes(48, 5120, 13824, 40, 8) | {"vocab_size": 152064}
_2_5_32B = _QWEN2 | sizes(64, 5120, 27648, 40, 8) | {"vocab_size": 152064}
_2_5_72B = _QWEN2 | sizes(80, 8192, 29568, 64, 8) | {"vocab_size": 152064}
_3_0_6B = _QWEN3 | sizes(28, 1024, 3072, 16, 8) | {"tie_word_embeddings": True}
_3_1B = _QWEN3 | sizes(28, 2048, 6144, 16, 8) | {"tie_word_embeddings": True}
_3_4B = _QWEN3 | sizes(36, 2560, 9728, 32, 8) | {"tie_word_embeddings": True}
_3_8B = _QWEN3 | sizes(36, 4096, 12288, 32, 8)
_3_14B = _QWEN3 | sizes(40, 5120, 17408, 40, 8)
_3_32B = _QWEN3 | sizes(64, 5120, 25600, 64, 8)
_3_30B = _QWEN3_MOE | sizes(48, 2048, 6144, 32, 4) | {"moe_intermediate_size": 768}
_3_235B = _QWEN3_MOE | sizes(94, 4096, 12288, 64, 4) | {"moe_intermediate_size": 1536}
_1_5_MOE = (
    _QWEN
    | sizes(24, 2048, 5632, 16, 16)
    | {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "max_position_embeddings": 8192,
        "eos_token_id": 151643,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
    }
)
_2_57B = (
    _1_5_MOE
    | sizes(28, 3584, 18944, 28, 4)
    | {
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2560,
        "shared_expert_intermediate_size": 20480,
    }
)

_POST_TRAINED = {"max_position_embeddings": 40960}
"""Context length of Qwen3 after post-training."""
_2507 = {"max_position_embeddings": 262144, "rope_theta": 10000000.0}
"""Context length of the releases of July 2025."""
_BASE = {"eos_token_id": 151643}
_LONG_BASE = _BASE | {"max_position_embeddings": 131072, "rms_norm_eps": 1e-5}
"""Qwen2.5 of 14 billion parameters and more, before post-training."""

MODELS: dict[str, dict[str, Any]] = {
    "Qwen/Qwen2-0.5B-Instruct": _2_5_0_5B,
    "Qwen/Qwen2-7B-Instruct": _2_5_7B,
    "Qwen/Qwen2-57B-A14B": _2_57B | {"max_position_embeddings": 131072},
    "Qwen/Qwen2-57B-A14B-Instruct": _2_57B | {"max_position_embeddings": 32768, "eos_token_id": 151645},
    "Qwen/Qwen1.5-MoE-A2.7B": _1_5_MOE,
    "Qwen/Qwen2.5-0.5B": _2_5_0_5B | _BASE,
    "Qwen/Qwen2.5-0.5B-Instruct": _2_5_0_5B,
    "Qwen/Qwen2.5-1.5B": _2_5_1B | _BASE | {"max_position_embeddings": 131072},
    "Qwen/Qwen2.5-1.5B-Instruct": _2_5_1B,
    "Qwen/Qwen2.5-3B": _2_5_3B | _BASE,
    "Qwen/Qwen2.5-3B-Instruct": _2_5_3B,
    "Qwen/Qwen2.5-7B": _2_5_7B | _BASE | {"max_position_embeddings": 131072},
    "Qwen/Qwen2.5-7B-Instruct": _2_5_7B,
    "Qwen/Qwen2.5-Coder-7B-Instruct": _2_5_7B,
    "Qwen/Qwen2.5-Math-7B": _2_5_7B | _BASE | {"max_position_embeddings": 4096, "rope_theta": 10000.0},
    "Qwen/Qwen2.5-14B": _2_5_14B | _LONG_BASE,
    "Qwen/Qwen2.5-14B-Instruct": _2_5_14B,
    "Qwen/Qwen2.5-32B": _2_5_32B | _LONG_BASE,
    "Qwen/Qwen2.5-32B-Instruct": _2_5_32B,
    "Qwen/Qwen2.5-72B": _2_5_72B | _LONG_BASE,
    "Qwen/Qwen2.5-72B-Instruct": _2_5_72B,
    "Qwen/Qwen3-0.6B": _3_0_6B | _POST_TRAINED,
    "Qwen/Qwen3-0.6B-Base": _3_0_6B | _BASE,
    "Qwen/Qwen3-1.7B": _3_1B | _POST_TRAINED,
    "Qwen/Qwen3-1.7B-Base": _3_1B | _BASE,
    "Qwen/Qwen3-4B": _3_4B | _POST_TRAINED,
    "Qwen/Qwen3-4B-Base": _3_4B | _BASE,
    "Qwen/Qwen3-8B": _3_8B | _POST_TRAINED,
    "Qwen/Qwen3-8B-Base": _3_8B | _BASE,
    "Qwen/Qwen3-14B": _3_14B | _POST_TRAINED,
    "Qwen/Qwen3-14B-Base": _3_14B | _BASE,
    "Qwen/Qwen3-32B": _3_32B | _POST_TRAINED,
    "Qwen/Qwen3-30B-A3B": _3_30B | _POST_TRAINED,
    "Qwen/Qwen3-30B-A3B-Base": _3_30B | _BASE,
    "Qwen/Qwen3-30B-A3B-Thinking-2507": _3_30B | _2507,
    "Qwen/Qwen3-235B-A22B": _3_235B | _POST_TRAINED,
}
"""Name on the Hugging Face hub → config.json."""
