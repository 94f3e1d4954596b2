"""The config.json of gpt-oss.

The files on the hub also contain `quantization_config`, because the experts are stored in MXFP4. The key describes the
files, not the model, and is left out here.
"""

from __future__ import annotations

from typing import Any


def _config(layers: int, experts: int) -> dict[str, Any]:
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_act": "silu",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": layers,
        "layer_types": [("sliding_attention", "full_attention")[index % 2] for index in range(layers)],
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "attention_bias": True,
        "sliding_window": 128,
        "num_local_experts": experts,
        "num_experts_per_tok": 4,
        "swiglu_limit": 7.0,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
        "max_position_embeddings": 131072,
        "vocab_size": 201088,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "eos_token_id": 200002,
        "pad_token_id": 199999,
    }


MODELS: dict[str, dict[str, Any]] = {
    "openai/gpt-oss-20b": _config(24, 32),
    "openai/gpt-oss-120b": _config(36, 128),
}
"""Name on the Hugging Face hub → config.json."""
