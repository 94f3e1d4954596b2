"""The tensors of a Hugging Face checkpoint on disk, by name and shape. They are the weights' global identities."""

from __future__ import annotations

from skyrl_mega.models.blocks.base import Tensors
from skyrl_mega.models.decoder import Decoder


def tensors(d: Decoder) -> Tensors:
    """Name → shape. Linear weights are [out, in]; experts are separate; a tied head has no tensor of its own."""
    found = d.embedding.hf_tensors("model")
    for index in range(d.layers):
        for block in d.layer(index):
            found |= block.hf_tensors(f"model.layers.{index}")
    return found | d.head.hf_tensors("model")
