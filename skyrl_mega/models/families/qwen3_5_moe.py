"""Qwen3.5 as published: the text model of `qwen3_5_moe_text` in files with a vision tower.

The text model's keys are in `text_config`, its tensors below `model.language_model`. The experts of a layer are two
tensors (the published files in BF16), or three tensors for each expert (the published files in FP8, and files saved by
transformers). The vision tower (`model.visual.*`) and the layers for multi-token prediction (`mtp.*`) are neither read
nor trained; an export copies them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from skyrl_mega.models.blocks.experts import Experts
from skyrl_mega.models.blocks.stacked_experts import StackedExperts
from skyrl_mega.models.config_json import Hf, unsupported
from skyrl_mega.models.decoder import Decoder
from skyrl_mega.models.families import qwen3_5_moe_text

CLASS = qwen3_5_moe_text.CLASS
"""The transformers class of the text model, by which vLLM selects the model."""
PREFIX = "model.language_model"
"""Beginning of the names of the text model's tensors."""
TEXT = "text_config"
"""Key of config.json with the text model's keys."""
TIED, QUANTISATION = "tie_word_embeddings", "quantization_config"
SEPARATE = "skyrl_mega_separate_experts"
"""Key that `in_files` adds to config.json: True if each expert has tensors of its own."""
FORMS = {".mlp.experts.0.gate_proj.weight": True, ".mlp.experts.gate_up_proj": False}
"""Ending of a tensor's name → value of `SEPARATE` for files with such a tensor."""


def describe(hf: Hf) -> Decoder:
    """Returns the layers and sizes of the text model (`text_config`) from the config.json of a Qwen3.5 model with
    experts and a vision tower. Without `SEPARATE`, the form of the experts follows from `quantization_config`.

    Raises:
        UserError: `text_config` or one of its keys is missing, or a value is not supported.
    """
    text = hf.get(TEXT)
    if not isinstance(text, Mapping):
        raise unsupported(hf, TEXT, "the keys of the text model")
    if hf.get(TIED, False) != text.get(TIED, False):  # vLLM reads the text model's key, transformers the other
        raise unsupported(
            {f"{TEXT}.{TIED}": text.get(TIED)}, f"{TEXT}.{TIED}", f"the value of {TIED} outside of {TEXT}"
        )
    quantisation = hf.get(QUANTISATION, text.get(QUANTISATION))
    read = Experts.read if hf.get(SEPARATE, bool(quantisation)) else StackedExperts.read
    decoder = qwen3_5_moe_text.of_experts({**text, QUANTISATION: quantisation}, read)
    return replace(decoder, prefix=PREFIX)


def in_files(hf: Hf, names: Collection[str]) -> Hf:
    """Returns config.json with `SEPARATE` according to the names of the tensors in the model's files; unchanged if no
    name tells."""
    endings = {
        name[name.index(".mlp.") :] for name in names if name.startswith(f"{PREFIX}.layers.") and ".mlp." in name
    }
    return next(({**hf, SEPARATE: separate} for ending, separate in FORMS.items() if ending in endings), hf)
