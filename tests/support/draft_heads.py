"""Tiny heads of draft tokens with random weights, and layers of multi-token prediction in a model's files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

HEADS, KV_HEADS, WIDTH = 2, 1, 32
OWN = [3, 5, 11, 13]
"""Tokens of the vocabulary of an EAGLE-3 head."""


def build_head(path: Path, hf: dict[str, Any], method: str, **changes: Any) -> Path:
    """Builds a head in a new folder.

    Args:
        path: The folder.
        hf: The policy's config.json.
        method: `eagle`, a head with the policy's embedding and output projection; or `eagle3`, a head with the policy's
            embedding and an output projection of its own for the tokens `OWN`.
        changes: Other values for keys of the head's config.json.
    """
    hidden, vocab, third = hf["hidden_size"], hf["vocab_size"], method == "eagle3"
    config = {
        "architectures": ["LlamaForCausalLMEagle3" if third else "LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": WIDTH,
        "intermediate_size": 2 * hidden,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": hf["max_position_embeddings"],
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    if third:
        config |= {"draft_vocab_size": len(OWN), "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    layer, width = ("midlayer", 2 * hidden) if third else ("layers.0", hidden)
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, (3 if third else 2) * hidden),
        f"{layer}.self_attn.q_proj.weight": (HEADS * WIDTH, width),
        f"{layer}.self_attn.k_proj.weight": (KV_HEADS * WIDTH, width),
        f"{layer}.self_attn.v_proj.weight": (KV_HEADS * WIDTH, width),
        f"{layer}.self_attn.o_proj.weight": (hidden, HEADS * WIDTH),
        f"{layer}.mlp.gate_proj.weight": (2 * hidden, hidden),
        f"{layer}.mlp.up_proj.weight": (2 * hidden, hidden),
        f"{layer}.mlp.down_proj.weight": (hidden, 2 * hidden),
        f"{layer}.post_attention_layernorm.weight": (hidden,),
    }
    if third:
        norms = (f"{layer}.hidden_norm.weight", f"{layer}.input_layernorm.weight", "norm.weight")
        shapes |= dict.fromkeys(norms, (hidden,)) | {"lm_head.weight": (len(OWN), hidden)}
    weights = random(shapes)
    if third:
        weights["d2t"] = torch.tensor(OWN) - torch.arange(len(OWN))
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config | changes))
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def random(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Returns random matrices, and norms of ones."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.ones(shape) if len(shape) == 1 else 0.2 * torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
    }


def add_prediction_layer(path: Path) -> None:
    """Adds a layer of multi-token prediction to a model's files: a copy of its last layer, with random norms and
    projection, and the embedding and output projection again, as in DeepSeek-V3's files."""
    hf, weights = json.loads((path / "config.json").read_text()), load_file(path / "model.safetensors")
    layers, hidden = hf["num_hidden_layers"], hf["hidden_size"]
    last, new = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    weights |= {new + name.removeprefix(last): w.clone() for name, w in weights.items() if name.startswith(last)}
    names = ("enorm.weight", "hnorm.weight", "shared_head.norm.weight")
    weights |= random(dict.fromkeys([new + name for name in names], (hidden,)))
    weights |= random({f"{new}eh_proj.weight": (hidden, 2 * hidden)})
    weights[f"{new}embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    weights[f"{new}shared_head.head.weight"] = weights["lm_head.weight"].clone()
    (path / "config.json").write_text(json.dumps(hf | {"num_nextn_predict_layers": 1}))
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def favour(path: Path, tokens: list[int]) -> None:
    """Makes a model, and every head with the model's output projection, prefer these tokens."""
    weights = load_file(path / "model.safetensors")
    weights["lm_head.weight"][tokens] *= 10
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
