"""Qwen2 and Qwen2.5 (arXiv:2407.10671): bias on q, k and v."""

from __future__ import annotations

from skyrl_mega.common.errors import UserError
from skyrl_mega.models.blocks.gated_mlp import GatedMlp
from skyrl_mega.models.blocks.gqa import GroupedQueryAttention
from skyrl_mega.models.config_json import Hf, integer, with_defaults
from skyrl_mega.models.decoder import Decoder, read_decoder

CLASS = "Qwen2ForCausalLM"
"""The transformers class, by which vLLM selects the model."""


def describe(hf: Hf) -> Decoder:
    """Returns the layers and sizes of a Qwen2 model from its config.json.

    Raises:
        UserError: A key is missing, or a value is not supported.
    """
    hf = with_defaults(hf, max_position_embeddings=32768, num_key_value_heads=32)
    attention = GroupedQueryAttention.read(hf, qk_norm="none", qkv_bias=True)
    decoder = read_decoder(hf, [(attention, GatedMlp.read(hf))] * integer(hf, "num_hidden_layers"))
    if attention.head_dim * attention.heads != decoder.hidden:
        # vLLM derives the head's width of a Qwen2 and ignores head_dim.
        raise UserError(
            f"head_dim {attention.head_dim} × num_attention_heads {attention.heads} is not "
            f"hidden_size {decoder.hidden}, as a qwen2 needs; give head_dim "
            f"{decoder.hidden // attention.heads} or model_type qwen3",
            key="config.json",
        )
    return decoder
