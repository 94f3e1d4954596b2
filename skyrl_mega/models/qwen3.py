"""Qwen3 (arXiv:2505.09388): RMSNorm on every query and key head, no bias."""

from __future__ import annotations

from skyrl_mega.models.decoder import Decoder, Hf, read_decoder


def describe(hf: Hf) -> Decoder:
    """The model that `hf` asks for."""
    return read_decoder(hf, qk_norm=True, qkv_bias=False, head_dim=128)
