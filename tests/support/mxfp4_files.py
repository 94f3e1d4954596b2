"""Checkpoints of gpt-oss with random experts in MXFP4, and their values as transformers dequantises them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"]}
"""`quantization_config`, as in gpt-oss-20b."""
SCALES = (118, 124)
"""Bounds of the random scales' bytes: the largest numbers are about 1."""


def transformers_values(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns transformers' dequantisation, [experts, columns, rows]."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    values: Tensor = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    return values


def rewrite(model: Path, folder: Path, seed: int = 1) -> dict[str, Tensor]:
    """Writes a model's directory again as on the hub: random experts in MXFP4, all other tensors in BF16.

    Args:
        model: A directory of gpt-oss with a single file.
        folder: The directory, new or the same.
        seed: Seed of the experts' numbers.

    Returns:
        Every tensor of the model in BF16, in the order of axes on disk.
    """
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    expected = {name: tensor.bfloat16() for name, tensor in load_file(model / "model.safetensors").items()}
    stored = dict(expected)
    for name in [name for name in expected if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, rows, columns = stored.pop(name).shape
        blocks = torch.randint(0, 256, (experts, columns, rows // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(*SCALES, blocks.shape[:-1], generator=generator, dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expected[name] = transformers_values(blocks, scales, torch.bfloat16)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    hf = json.loads((model / "config.json").read_text())
    hf |= {"quantization_config": CONFIG, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(hf))
    return expected
