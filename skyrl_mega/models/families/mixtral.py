"""Mixtral (arXiv:2401.04088): Mistral's attention, experts in every layer, softmax over the chosen experts."""

from __future__ import annotations

from typing import Any

from skyrl_mega.models.blocks.experts import ExpertNames, Experts
from skyrl_mega.models.blocks.gqa import GroupedQueryAttention
from skyrl_mega.models.blocks.routing import ExpertRouter
from skyrl_mega.models.config_json import Hf, integer, require, with_defaults
from skyrl_mega.models.decoder import Decoder, read_decoder

NAMES = ExpertNames("block_sparse_moe", matrices=("w1", "w3", "w2"))
"""Mixtral's names of gate, up and down."""

CLASS = "MixtralForCausalLM"
"""The transformers class, by which vLLM selects the model."""


def describe(hf: Hf) -> Decoder:
    """Returns the layers and sizes of a Mixtral model from its config.json.

    Raises:
        UserError: A key is missing, or a value is not supported.
    """
    hf = with_defaults(
        hf, max_position_embeddings=131072, num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=1_000_000.0
    )
    require(hf, "router_jitter_noise", 0.0)
    integer(hf, "num_key_value_heads")  # null is refused by the transformers class
    attention = GroupedQueryAttention.read(hf, qk_norm="none", qkv_bias=False)
    router = ExpertRouter("softmax", renormalize=True)
    experts = Experts.read(hf, router, names=NAMES, count=("num_local_experts",), width="intermediate_size")
    return read_decoder(hf, [(attention, experts)] * integer(hf, "num_hidden_layers"))


def small(hf: dict[str, Any]) -> dict[str, Any]:
    """Returns the config.json of a small model of this family, from a config.json with the common keys and Qwen3-MoE's
    keys for the sizes of experts. `hf` stays unchanged. Raises KeyError if `num_experts` or `moe_intermediate_size` is
    missing; other keys are not checked."""
    renamed = ("num_experts", "moe_intermediate_size", "attention_bias")
    own = {"num_local_experts": hf["num_experts"], "intermediate_size": hf["moe_intermediate_size"]}
    return {key: value for key, value in hf.items() if key not in renamed} | own | {"sliding_window": None}
