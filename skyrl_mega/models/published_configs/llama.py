"""The config.json of Llama 3.1 to 3.3 and SmolLM2."""

from __future__ import annotations

from typing import Any

from skyrl_mega.models.published_configs.sizes import sizes

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}
_SMOLLM2 = (
    _LLAMA
    | sizes(30, 576, 1536, 9, 3)
    | {
        "rope_theta": 100000.0,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
)


def _llama_3(scaling: float) -> dict[str, Any]:
    """Returns the keys shared by Llama 3.1 to 3.3, with the factor by which positions are stretched."""
    return _LLAMA | {
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": scaling,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    }


_L3_1B = _llama_3(32.0) | sizes(16, 2048, 8192, 32, 8) | {"tie_word_embeddings": True}
_L3_3B = _llama_3(32.0) | sizes(28, 3072, 8192, 24, 8) | {"tie_word_embeddings": True}
_L3_8B = _llama_3(8.0) | sizes(32, 4096, 14336, 32, 8)
_L3_70B = _llama_3(8.0) | sizes(80, 8192, 28672, 64, 8)
_L3_CHAT = {"eos_token_id": [128001, 128008, 128009]}
"""End tokens of Llama 3 after post-training."""

MODELS: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-3.1-8B": _L3_8B,
    "meta-llama/Llama-3.1-8B-Instruct": _L3_8B | _L3_CHAT,
    "meta-llama/Llama-3.1-70B": _L3_70B,
    "meta-llama/Llama-3.1-70B-Instruct": _L3_70B | _L3_CHAT,
    "meta-llama/Llama-3.2-1B": _L3_1B,
    "meta-llama/Llama-3.2-1B-Instruct": _L3_1B | _L3_CHAT,
    "meta-llama/Llama-3.2-3B": _L3_3B,
    "meta-llama/Llama-3.2-3B-Instruct": _L3_3B | _L3_CHAT,
    "meta-llama/Llama-3.3-70B-Instruct": _L3_70B | _L3_CHAT,
    "HuggingFaceTB/SmolLM2-135M-Instruct": _SMOLLM2,
}
"""Name on the Hugging Face hub → config.json."""
