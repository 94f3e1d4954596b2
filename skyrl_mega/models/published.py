"""The sizes of published models, for dry runs without the checkpoint on this machine.

The numbers come from each model's config.json on the Hugging Face hub. A run checks the loaded weights against the
config.json next to them, and uses this table only without such a file.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from skyrl_mega.common.errors import UserError

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


def _sizes(layers: int, hidden: int, ffn: int, heads: int, kv_heads: int) -> dict[str, int]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


_2_5_0_5B = _QWEN2 | _sizes(24, 896, 4864, 14, 2) | {"tie_word_embeddings": True}
_2_5_1B = _QWEN2 | _sizes(28, 1536, 8960, 12, 2) | {"tie_word_embeddings": True}
_2_5_3B = _QWEN2 | _sizes(36, 2048, 11008, 16, 2) | {"tie_word_embeddings": True}
_2_5_7B = _QWEN2 | _sizes(28, 3584, 18944, 28, 4) | {"vocab_size": 152064}
_2_5_14B = _QWEN2 | _sizes(48, 5120, 13824, 40, 8) | {"vocab_size": 152064}
_2_5_32B = _QWEN2 | _sizes(64, 5120, 27648, 40, 8) | {"vocab_size": 152064}
_2_5_72B = _QWEN2 | _sizes(80, 8192, 29568, 64, 8) | {"vocab_size": 152064}
_3_0_6B = _QWEN3 | _sizes(28, 1024, 3072, 16, 8) | {"tie_word_embeddings": True}
_3_1B = _QWEN3 | _sizes(28, 2048, 6144, 16, 8) | {"tie_word_embeddings": True}
_3_4B = _QWEN3 | _sizes(36, 2560, 9728, 32, 8) | {"tie_word_embeddings": True}
_3_8B = _QWEN3 | _sizes(36, 4096, 12288, 32, 8)
_3_14B = _QWEN3 | _sizes(40, 5120, 17408, 40, 8)
_3_32B = _QWEN3 | _sizes(64, 5120, 25600, 64, 8)
_3_30B = _QWEN3_MOE | _sizes(48, 2048, 6144, 32, 4) | {"moe_intermediate_size": 768}
_3_235B = _QWEN3_MOE | _sizes(94, 4096, 12288, 64, 4) | {"moe_intermediate_size": 1536}

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}
_SMOLLM2 = (
    _LLAMA
    | _sizes(30, 576, 1536, 9, 3)
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


_L3_1B = _llama_3(32.0) | _sizes(16, 2048, 8192, 32, 8) | {"tie_word_embeddings": True}
_L3_3B = _llama_3(32.0) | _sizes(28, 3072, 8192, 24, 8) | {"tie_word_embeddings": True}
_L3_8B = _llama_3(8.0) | _sizes(32, 4096, 14336, 32, 8)
_L3_70B = _llama_3(8.0) | _sizes(80, 8192, 28672, 64, 8)
_L3_CHAT = {"eos_token_id": [128001, 128008, 128009]}
"""End tokens of Llama 3 after post-training."""

_POST_TRAINED = {"max_position_embeddings": 40960}
"""Context length of Qwen3 after post-training."""
_BASE = {"eos_token_id": 151643}
_LONG_BASE = _BASE | {"max_position_embeddings": 131072, "rms_norm_eps": 1e-5}
"""Qwen2.5 of 14 billion parameters and more, before post-training."""

KNOWN: dict[str, dict[str, Any]] = {
    "Qwen/Qwen2-0.5B-Instruct": _2_5_0_5B,
    "Qwen/Qwen2-7B-Instruct": _2_5_7B,
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
    "Qwen/Qwen3-235B-A22B": _3_235B | _POST_TRAINED,
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

BUILT_LOCALLY = {"smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct"}
"""Folder of the CPU recipes' model, built by `skyrl_mega.models.smollm2` → the model's name on the hub."""


def hub_name(path: str | PurePath) -> str | None:
    """Returns the hub name of the known model in a path's last component; None for other names.

    `models/Qwen3-30B-A3B` gives `Qwen/Qwen3-30B-A3B`.
    """
    last = PurePath(path).name
    return next((name for name in KNOWN if name.partition("/")[2] == last), BUILT_LOCALLY.get(last))


def how_to_get(path: str | PurePath) -> str:
    """Returns the command to download or build the known model at this path."""
    if PurePath(path).name in BUILT_LOCALLY:
        return f"`python -m skyrl_mega.models.smollm2 --output {path}` makes it"
    return f"`hf download {hub_name(path)} --local-dir {path}` fetches it"


def known(name: str | PurePath) -> dict[str, Any]:
    """Returns the config.json of a model by hub name, or by a path ending in the model's name.

    Raises:
        UserError: The model is unknown.
    """
    known_name = hub_name(name)
    if known_name is None:
        raise UserError(f"no known model; known are {', '.join(KNOWN)}", key=name)
    return dict(KNOWN[known_name])
