"""Files of a head of draft tokens (EAGLE, EAGLE-3): dense Llama layers that read hidden states of the policy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skyrl_mega.hf_checkpoint.index import names_in
from skyrl_mega.models.registry import architecture

TAKEN = "eagle_aux_hidden_state_layer_ids"
"""Key of config.json, or of its `eagle_config`: layers of the policy whose hidden states an EAGLE-3 head reads."""
DEFAULT_TAKEN = 3
"""Number of these layers if config.json names none: layer 2, the middle layer, and the third last."""


def taken_layers(head: Mapping[str, Any], layers: int) -> list[Any]:
    """Returns the policy's layers whose hidden states an EAGLE-3 head reads.

    Args:
        head: The head's config.json. Its own list is returned unchecked; an empty list, or a value other than a list,
            counts as absent.
        layers: Number of the policy's layers, for vLLM's default if config.json names none: layer 2, the middle layer,
            and the last but two.
    """
    given = head.get(TAKEN) or (head.get("eagle_config") or {}).get(TAKEN)
    return list(given) if isinstance(given, list) else [2, layers // 2, layers - DEFAULT_TAKEN]


def tensors(path: Path, head: Mapping[str, Any], method: str) -> dict[str, tuple[int, ...]]:
    """Returns name → expected shape of a head's matrices and norms, computed from config.json.

    Leaves out the tensors that the head takes from the policy: an embedding missing in the files, the output projection
    of an EAGLE head, and that of an EAGLE-3 head with a full vocabulary if missing in the files. Reads only the names
    of the tensors from the files.

    Args:
        path: The directory of the head.
        head: Its config.json.
        method: `eagle` or `eagle3`.

    Raises:
        UserError: config.json is not supported or lacks a size, or the files cannot be read.
    """
    third, names = method == "eagle3", names_in(path)
    decoder = architecture(head).describe(head)
    hidden, vocab = decoder.hidden, head.get("draft_vocab_size") or decoder.vocab
    read = len(taken_layers(head, 0)) if third else 2  # EAGLE reads embedding and hidden state
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, read * hidden)}
    if third:
        shapes |= {"norm.weight": (hidden,), "layers.0.hidden_norm.weight": (hidden,)}
        if vocab != decoder.vocab or "lm_head.weight" in names:
            shapes["lm_head.weight"] = (vocab, hidden)
    if "embed_tokens.weight" in names:
        shapes["embed_tokens.weight"] = (decoder.vocab, hidden)
    for name, shape in architecture(head).tensors(head).items():
        if not name.startswith("model.layers."):
            continue
        name = name.removeprefix("model.")
        if third and name in [f"layers.0.self_attn.{each}_proj.weight" for each in "qkv"]:
            shape = (shape[0], 2 * hidden)  # the first layer also reads the embedding
        shapes[name] = shape
    if not third:
        del shapes["layers.0.input_layernorm.weight"]
    if third and "midlayer.mlp.up_proj.weight" in names:
        shapes = {name.replace("layers.0.", "midlayer."): shape for name, shape in shapes.items()}
    return shapes
