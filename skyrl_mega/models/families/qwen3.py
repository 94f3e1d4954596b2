"""Qwen3 (arXiv:2505.09388): RMSNorm on every query and key head, no bias."""

from __future__ import annotations

from skyrl_mega.models.blocks.gated_mlp import GatedMlp
from skyrl_mega.models.blocks.gqa import GroupedQueryAttention
from skyrl_mega.models.config_json import Hf, integer, with_defaults
from skyrl_mega.models.decoder import Decoder, read_decoder

CLASS = "Qwen3ForCausalLM"
"""The transformers class, by which vLLM selects the model."""


def describe(hf: Hf) -> Decoder:
    """Returns the layers and sizes of a Qwen3 model from its config.json.

    Raises:
        UserError: A key is missing, or a value is not supported.
    """
    hf = with_defaults(hf, max_position_embeddings=32768, num_key_value_heads=32, head_dim=128)
    integer(hf, "head_dim")  # unlike related classes, Qwen3's refuses null
    attention = GroupedQueryAttention.read(hf, qk_norm="head", qkv_bias=False)
    return read_decoder(hf, [(attention, GatedMlp.read(hf))] * integer(hf, "num_hidden_layers"))
