"""Small models with random weights, written as Hugging Face directories, for the quickstart and the tests."""

from __future__ import annotations

import json
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from skyrl_mega.cluster.atomic_output import Occupied, atomic_folder
from skyrl_mega.common.errors import UserError
from skyrl_mega.common.values import shown
from skyrl_mega.config.schema import BuildConfig
from skyrl_mega.config.schema.model import WITH_EXPERTS, WITHOUT_EXPERTS
from skyrl_mega.models.char_tokenizer import BOS, EOS, PAD, VOCABULARY, write_tokenizer
from skyrl_mega.models.registry import ARCHITECTURES, architecture

KEYS = {
    "architecture": "model_type",
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn": "intermediate_size",
    "experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
    "expert_ffn": "moe_intermediate_size",
    "tied": "tie_word_embeddings",
    "max_length": "max_position_embeddings",
}
"""Setting of `model.build` → key of config.json."""
EXPERT_SIZES = ("experts", "experts_per_token", "expert_ffn")
"""Settings of `model.build` that a dense model does not have."""


def hf_config(config: BuildConfig) -> dict[str, Any]:
    """Returns the content of config.json for the model described by `model.build`. Does not check that the architecture
    supports the sizes. Raises UserError for an architecture that `model.build` does not allow."""
    allowed = (*WITH_EXPERTS, *WITHOUT_EXPERTS)
    if config.architecture not in allowed:
        longer = [name for name in allowed if name.startswith(config.architecture)]  # …_text
        near = longer or get_close_matches(config.architecture, allowed, n=1)
        raise UserError(
            f"allowed is one of {', '.join(allowed)}",
            key="model.build.architecture",
            value=shown(config.architecture),
            fix=f"nearest: model.build.architecture={near[0]}" if near else "",
        )
    family = ARCHITECTURES[config.architecture]
    hf: dict[str, Any] = {
        "architectures": [family.transformers_class],
        **{key: getattr(config, name) for name, key in KEYS.items() if family.small or name not in EXPERT_SIZES},
        "vocab_size": len(VOCABULARY),
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "initializer_range": 0.02,
        "pad_token_id": VOCABULARY[PAD],
        "bos_token_id": VOCABULARY[BOS],
        "eos_token_id": VOCABULARY[EOS],
        "torch_dtype": "float32",
        "use_cache": True,
    }
    if family.small:
        hf = family.small(hf)
    if config.architecture == "qwen2":
        del hf["attention_bias"]  # a Qwen2 always has the bias of q, k and v
    return hf


def build(config: BuildConfig, path: Path, seed: int = 0) -> None:
    """Creates a model directory with random weights: config.json, float32 safetensors, generation_config.json.

    Adds a tokenizer and chat template with `model.build.tokenizer=characters`. Matrices are normal with standard
    deviation 0.02, norms 1 (0 where 1 is added to them), biases 0. The directory appears whole or not at all; anything
    existing at `path` (another process was faster) stays unchanged.

    Args:
        config: Architecture and sizes (`model.build`).
        path: The directory to create.
        seed: Seed of the weights.

    Raises:
        UserError: The architecture does not support the sizes, or `model.build` does not allow the architecture.
        OSError: A file cannot be written.
    """
    if path.exists():
        return
    hf = hf_config(config)
    try:
        tensors = architecture(hf).disk_tensors(hf)
    except UserError as error:
        raise UserError(error, key="model.build") from error
    centered = architecture(hf).describe(hf).zero_centered_norms
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, torch.Tensor] = {}
    for name, shape in tensors.items():
        if name.endswith("norm.weight"):
            zero = centered and not name.endswith("linear_attn.norm.weight")
            weights[name] = torch.zeros(shape) if zero else torch.ones(shape)
        elif name.endswith("bias"):
            weights[name] = torch.zeros(shape)
        else:
            weights[name] = torch.randn(shape, generator=generator) * hf["initializer_range"]
    with suppress(Occupied), atomic_folder(path, f"model.path = {path}", last="config.json") as partial:
        (partial / "config.json").write_text(json.dumps(hf, indent=1))
        generation = {key: hf[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        (partial / "generation_config.json").write_text(json.dumps(generation, indent=1))
        if config.tokenizer == "characters":
            write_tokenizer(partial)
        save_file(weights, str(partial / "model.safetensors"), metadata={"format": "pt"})
