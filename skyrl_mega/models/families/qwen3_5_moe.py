"""Qwen3.5 as published: the text model of `qwen3_5_moe_text` in files with a vision tower.

The text model's keys are in `text_config`, its tensors below `model.language_model`, and the experts of a layer are two
tensors. The vision tower (`model.visual.*`) and the layers for multi-token prediction (`mtp.*`) are neither read nor
trained; an export copies them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from skyrl_mega.models.blocks.stacked_experts import StackedExperts
from skyrl_mega.models.config_json import Hf, unsupported
from skyrl_mega.models.decoder import Decoder
from skyrl_mega.models.families import qwen3_5_moe_text

CLASS = qwen3_5_moe_text.CLASS
"""The transformers class of the text model, by which vLLM selects the model."""
TEXT = "text_config"
"""Key of config.json with the text model's keys."""


def describe(hf: Hf) -> Decoder:
    """Returns the layers and sizes of the text model (`text_config`) from the config.json of a Qwen3.5 model with
    experts and a vision tower.

    Raises:
        UserError: `text_config` or one of its keys is missing, or a value is not supported.
    """
    text = hf.get(TEXT)
    if not isinstance(text, Mapping):
        raise unsupported(hf, TEXT, "the keys of the text model")
    common = {key: hf[key] for key in ("quantization_config", "tie_word_embeddings") if key in hf}
    decoder = qwen3_5_moe_text.of_experts({**text, **common}, StackedExperts.read)
    return replace(decoder, prefix="model.language_model")
