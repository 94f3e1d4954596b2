"""Settings of the trained model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from skyrl_mega.config.schema.fields import Refusals, at_least, between, one_of

WITH_EXPERTS = (
    *("qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "glm4_moe", "minimax_m2"),
    *("deepseek_v3", "kimi_k2", "glm4_moe_lite", "deepseek_v2", "qwen3_next", "qwen3_5_moe_text", "gpt_oss"),
)
"""Architectures of mixtures of experts; the first is the default."""
WITHOUT_EXPERTS = ("qwen3", "qwen2", "llama")
"""Architectures of dense models."""


@dataclass
class BuildConfig:
    """Sizes of a small model with random weights, for tests and examples."""

    architecture: str = one_of(*WITH_EXPERTS, *WITHOUT_EXPERTS)
    """Architecture named in config.json."""
    hidden: int = at_least(8, 64)
    """Hidden size."""
    layers: int = between(1, 1000, 2)
    """Decoder layers."""
    heads: int = at_least(1, 4)
    """Attention heads."""
    kv_heads: int = at_least(1, 2)
    """Key/value heads."""
    head_dim: int = at_least(4, 32)
    """Width per head."""
    ffn: int = at_least(8, 128)
    """Intermediate size of a dense layer."""
    experts: int = at_least(0, 8)
    """Experts per MoE layer."""
    experts_per_token: int = at_least(1, 2)
    """Active experts per token."""
    expert_ffn: int = at_least(8, 64)
    """Intermediate size per expert."""
    tied: bool = False
    """Uses the embedding as output projection."""
    max_length: int = at_least(8, 256)
    """Maximum sequence length (max_position_embeddings)."""
    tokenizer: str = one_of("characters", "none")
    """Tokenizer of the model. characters: a token per printable ASCII character, with a chat template. none: no
    tokenizer."""


@dataclass
class ModelConfig:
    """The trained model: folder, number type and maximum length."""

    path: str = ""
    """Hugging Face directory with config.json, safetensors and tokenizer."""
    dtype: str = one_of("bfloat16", "float32")
    """Type of parameters and activations, in the policy and in the engines."""
    max_length: Optional[int] = at_least(1, None)
    """Maximum sequence length; null uses max_position_embeddings of config.json."""
    build: Optional[BuildConfig] = None
    """Model to build if the directory is missing; an existing directory with other sizes is an error."""

    def refusals(self) -> Refusals:
        """Yields a refusal if `path` is empty, and of impossible numbers of experts in `build`."""
        if not self.path:
            yield "", "model.path is not set: allowed is a Hugging Face directory (with model.build it is made there)"
        if self.build and self.build.architecture not in WITHOUT_EXPERTS:
            if self.build.experts < 1:
                yield "model.build.experts", f"{self.build.architecture} needs at least 1; or architecture=qwen3"
            if self.build.experts_per_token > self.build.experts:
                why = f"allowed is at most model.build.experts = {self.build.experts}"
                yield "model.build.experts_per_token", why
