"""A decoder-only transformer, read from a Hugging Face config.json: what the four architectures have in common.

Pre-norm RMSNorm, rotary positions, grouped-query attention, gated SiLU, and per layer either a dense block or
experts. An architecture's own file says which of the optional parts it has. What the policy or the engines cannot
compute exactly is refused here, by key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from skyrl_mega.config.errors import UserError
from skyrl_mega.config.values import shown

Hf = Mapping[str, Any]
"""The content of a Hugging Face config.json."""

LARGEST = 2**31 - 1
MOST = {"num_hidden_layers": 1000, "num_experts": 4096, "num_local_experts": 4096}
"""Whole numbers of a configuration at most: far above any model, and what its tensors can still be listed for."""


@dataclass(frozen=True)
class Rope:
    """Rotary positions (arXiv:2104.09864): the base, and how frequencies are stretched (`none`, `linear`, `llama3`)."""

    base: float
    scaling: str = "none"
    factor: float = 1.0


@dataclass(frozen=True)
class Experts:
    """The MoE layers: which they are, and what is in one."""

    count: int
    per_token: int
    width: int
    """Intermediate size of one expert."""
    renormalize: bool
    """The chosen experts' probabilities are divided by their sum."""
    layers: frozenset[int]
    """Global indices of the layers that have experts; the others are dense."""


@dataclass(frozen=True)
class Decoder:
    """The sizes and optional parts of a model. Field names are those of the literature, not of one library."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    """Intermediate size of a dense layer."""
    vocab: int
    max_length: int
    norm_eps: float
    tied: bool
    """The output projection is the embedding."""
    rope: Rope
    qk_norm: bool
    """RMSNorm over each query and key head."""
    qkv_bias: bool
    """Bias of the q, k and v projections."""
    experts: Experts | None = None

    def is_moe(self, layer: int) -> bool:
        """Whether `layer` (global index) has experts."""
        return self.experts is not None and layer in self.experts.layers


def read_decoder(
    hf: Hf, *, qk_norm: bool, qkv_bias: bool, head_dim: int | None = None, experts: Experts | None = None
) -> Decoder:
    """Reads the common keys; `head_dim` is the architecture's own default (None: hidden / heads).

    Raises:
        UserError: a key is missing or asks for something that is not supported.
    """
    heads, hidden = integer(hf, "num_attention_heads"), integer(hf, "hidden_size")
    kv_heads = integer(hf, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise _wrong(hf, "num_key_value_heads", f"a divisor of num_attention_heads {heads}")
    if hf.get("head_dim") is not None:
        head_dim = integer(hf, "head_dim")
    elif head_dim is None:
        head_dim = hidden // heads
    only(hf, "hidden_act", "silu")
    only(hf, "use_sliding_window", False)
    only(hf, "attention_bias", False)
    only(hf, "mlp_bias", False)
    if hf.get("quantization_config"):
        raise _wrong(hf, "quantization_config", "a checkpoint without quantisation")
    return Decoder(
        layers=integer(hf, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=integer(hf, "intermediate_size"),
        vocab=integer(hf, "vocab_size"),
        max_length=integer(hf, "max_position_embeddings", 2048),
        norm_eps=number(hf, "rms_norm_eps", 1e-6),
        tied=bool(hf.get("tie_word_embeddings", False)),
        rope=read_rope(hf),
        qk_norm=qk_norm,
        qkv_bias=qkv_bias,
        experts=experts,
    )


def read_rope(hf: Hf) -> Rope:
    """Rotary settings, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).

    megatron-core 0.16 knows linear interpolation, and Llama 3's scaling with Llama 3.1's own constants.
    """
    key = "rope_parameters" if hf.get("rope_parameters") else "rope_scaling"
    values = hf.get(key) or {}
    if not isinstance(values, Mapping):
        raise _wrong(hf, key, "a mapping")
    base = number(values if values.get("rope_theta") else hf, "rope_theta", 10000.0)
    kind = values.get("rope_type", values.get("type", "default"))
    if values.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0)) != 1.0:
        raise _wrong(hf, key, "a partial_rotary_factor of 1")
    if kind == "default":
        return Rope(base)
    if kind == "linear":
        return Rope(base, "linear", number(values, "factor"))
    constants = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}
    if kind == "llama3" and all(values.get(name) == value for name, value in constants.items()):
        return Rope(base, "llama3", number(values, "factor"))
    allowed = ", ".join(f"{name} {value}" for name, value in constants.items())
    raise _wrong(hf, key, f"rope_type default, linear, or llama3 with {allowed}")


def integer(hf: Hf, key: str, default: int | None = None) -> int:
    """A positive integer of the configuration."""
    value = hf.get(key)
    if value is None:
        if default is None:
            raise UserError(f"config.json: {key} is missing; a {hf.get('model_type')} checkpoint has it")
        return default
    most = MOST.get(key, LARGEST)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise _wrong(hf, key, f"a positive integer of at most {most}")
    return value


def number(hf: Hf, key: str, default: float | None = None) -> float:
    """A positive number of the configuration."""
    value = hf.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < inf:
        raise _wrong(hf, key, "a positive number")
    return float(value)


def only(hf: Hf, key: str, allowed: Any) -> None:
    """Refuses any other value of `key`; absent is allowed."""
    if hf.get(key, allowed) not in (allowed, None):
        raise _wrong(hf, key, f"{allowed!r}")


def _wrong(hf: Hf, key: str, allowed: str) -> UserError:
    return UserError(f"config.json: {key} is {shown(hf.get(key))}; skyrl_mega supports {allowed}; choose another model")
