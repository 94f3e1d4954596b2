"""Qwen2 and Qwen2.5 (arXiv:2407.10671): bias on q, k and v."""

from __future__ import annotations

from skyrl_mega.config.errors import UserError
from skyrl_mega.models.decoder import Decoder, Hf, read_decoder


def describe(hf: Hf) -> Decoder:
    """The model that `hf` asks for."""
    decoder = read_decoder(hf, qk_norm=False, qkv_bias=True)
    if decoder.head_dim * decoder.heads != decoder.hidden:
        # vLLM derives the head's width of a Qwen2 and ignores head_dim.
        raise UserError(
            f"config.json: head_dim {decoder.head_dim} × num_attention_heads {decoder.heads} is not hidden_size "
            f"{decoder.hidden}, as a qwen2 needs; give head_dim {decoder.hidden // decoder.heads} or model_type qwen3"
        )
    return decoder
