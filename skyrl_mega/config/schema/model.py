"""The model that is trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from skyrl_mega.config.schema.fields import at_least, between, one_of


@dataclass
class BuildConfig:
    """A small model with random weights. Where `model.path` exists already, it must have these sizes."""

    architecture: str = one_of("qwen3_moe", "qwen3", "qwen2", "llama")
    """Which architecture's config.json is written."""
    hidden: int = at_least(8, 64)
    """Hidden size."""
    layers: int = between(1, 1000, 2)
    """Decoder layers."""
    heads: int = at_least(1, 4)
    """Attention heads."""
    kv_heads: int = at_least(1, 2)
    """Key/value heads."""
    head_dim: int = at_least(4, 32)
    """Width of one head."""
    ffn: int = at_least(8, 128)
    """Intermediate size of a dense layer."""
    experts: int = at_least(0, 8)
    """Experts of a MoE layer."""
    experts_per_token: int = at_least(1, 2)
    """Experts that see one token."""
    expert_ffn: int = at_least(8, 64)
    """Intermediate size of one expert."""
    tied: bool = False
    """The output projection is the embedding."""
    max_length: int = at_least(8, 256)
    """Longest sequence (max_position_embeddings)."""
    tokenizer: str = one_of("characters", "none")
    """`characters`: one token per printable ASCII character, with a chat template."""


@dataclass
class ModelConfig:
    """The model that is trained."""

    path: str = ""
    """A Hugging Face directory: config.json, safetensors, tokenizer."""
    dtype: str = one_of("bfloat16", "float32")
    """Type of parameters and activations, in the policy and in the engines."""
    max_length: Optional[int] = at_least(1, None)
    """Longest sequence, where it is another than config.json's max_position_embeddings."""
    build: Optional[BuildConfig] = None
    """Builds the directory when it is not there; one that is there and has other sizes is refused."""
