"""Llama 2 and 3 (arXiv:2302.13971, arXiv:2407.21783), and SmolLM2, with the same architecture."""

from __future__ import annotations

from skyrl_mega.models.blocks.gated_mlp import GatedMlp
from skyrl_mega.models.blocks.gqa import GroupedQueryAttention
from skyrl_mega.models.config_json import Hf, integer, with_defaults
from skyrl_mega.models.decoder import Decoder, read_decoder

CLASS = "LlamaForCausalLM"
"""The transformers class, by which vLLM selects the model."""


def describe(hf: Hf) -> Decoder:
    """Returns the layers and sizes of a Llama model from its config.json.

    Raises:
        UserError: A key is missing, or a value is not supported.
    """
    hf = with_defaults(hf, max_position_embeddings=2048)
    attention = GroupedQueryAttention.read(hf, qk_norm="none", qkv_bias=False)
    return read_decoder(hf, [(attention, GatedMlp.read(hf))] * integer(hf, "num_hidden_layers"))
