"""Llama 2 and 3 (arXiv:2302.13971, arXiv:2407.21783), and SmolLM2, which is built alike."""

from __future__ import annotations

from skyrl_mega.models.decoder import Decoder, Hf, read_decoder


def describe(hf: Hf) -> Decoder:
    """The model that `hf` asks for."""
    return read_decoder(hf, qk_norm=False, qkv_bias=False)
