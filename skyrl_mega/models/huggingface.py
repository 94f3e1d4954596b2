"""The tensors of a Hugging Face checkpoint by name and shape, the global identities of weights."""

from __future__ import annotations

import re

from skyrl_mega.models.blocks.base import Tensors
from skyrl_mega.models.blocks.embedding import HEAD
from skyrl_mega.models.decoder import Decoder

_LAYER = re.compile(r"\.layers\.(\d{1,9})\.")
_BUFFER = "rotary_emb.inv_freq"
"""Ending of the name of a computed tensor, saved by old versions of transformers."""


def tensors(decoder: Decoder) -> Tensors:
    """Returns a new dict name → shape of every tensor in a checkpoint of the model, axes on disk perhaps in another
    order (`Decoder.disk_forms`). Linear weights are [out, in]; a tied head adds no tensor. Scales of a quantised
    checkpoint are not included."""
    shapes = decoder.embedding.hf_tensors("model")
    for source, block in decoder.layer_blocks:
        shapes |= block.hf_tensors(source)
    shapes |= decoder.head.hf_tensors("model")
    return {decoder.on_disk(name): shape for name, shape in shapes.items()}


def is_computed(decoder: Decoder, name: str) -> bool:
    """Returns True if a tensor on disk follows from the rest of the model and need not be read: the copy of a tied
    embedding, or the rotary frequencies. No content is compared."""
    return name.endswith(_BUFFER) or (name == HEAD and decoder.tied)


def is_in_layers(decoder: Decoder, name: str) -> bool:
    """Returns True if a tensor's name belongs to one of the model's layers. False for tensors outside of layers, and
    for layers for multi-token prediction (higher numbers).
    """
    layer = _LAYER.match(name.removeprefix(decoder.prefix))
    return layer is not None and int(layer[1]) < decoder.layers
