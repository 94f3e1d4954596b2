"""Qwen3-MoE (arXiv:2505.09388): Qwen3 attention, routed experts without shared experts, softmax routing."""

from __future__ import annotations

from typing import Any

from skyrl_mega.models.blocks.experts import Experts
from skyrl_mega.models.blocks.gated_mlp import GatedMlp
from skyrl_mega.models.blocks.gqa import GroupedQueryAttention
from skyrl_mega.models.blocks.routing import ExpertRouter, sparse_step_layers
from skyrl_mega.models.config_json import Hf, integer, with_defaults
from skyrl_mega.models.decoder import Decoder, read_decoder

CLASS = "Qwen3MoeForCausalLM"
"""The transformers class, by which vLLM selects the model."""


def describe(hf: Hf) -> Decoder:
    """Returns the layers and sizes of a Qwen3-MoE model from its config.json.

    Raises:
        UserError: A key is missing, or a value is not supported.
    """
    hf = with_defaults(
        hf, max_position_embeddings=32768, num_key_value_heads=4, decoder_sparse_step=1, norm_topk_prob=False
    )
    integer(hf, "num_key_value_heads")  # unlike related classes, Qwen3-MoE's refuses null
    moe = sparse_step_layers(hf)
    attention = GroupedQueryAttention.read(hf, qk_norm="head", qkv_bias=False)
    experts, dense = Experts.read(hf, ExpertRouter.softmax(hf)), GatedMlp.read(hf)
    return read_decoder(hf, [(attention, experts if has_experts else dense) for has_experts in moe])


def small(hf: dict[str, Any]) -> dict[str, Any]:
    """Returns the config.json of a small model of this family, from a config.json with the common keys and Qwen3-MoE's
    keys for the sizes of experts. `hf` stays unchanged; no key is required."""
    return hf | {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
