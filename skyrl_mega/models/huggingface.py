"""The tensors of a Hugging Face checkpoint on disk by name and shape, the global identities of weights."""

from __future__ import annotations

from skyrl_mega.models.blocks.base import Tensors
from skyrl_mega.models.decoder import Decoder


def tensors(decoder: Decoder) -> Tensors:
    """Returns name → shape. Linear weights are [out, in]; experts are separate tensors; a tied head adds no tensor."""
    shapes = decoder.embedding.hf_tensors("model")
    for index in range(decoder.layers):
        for block in decoder.layer(index):
            shapes |= block.hf_tensors(f"model.layers.{index}")
    return shapes | decoder.head.hf_tensors("model")
