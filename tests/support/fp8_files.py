"""Block-FP8 checkpoints, and the formula of their values: both written out element by element, without the project."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FP8 = torch.float8_e4m3fn
CONFIG = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
"""`quantization_config` of DeepSeek-V3."""


def values(numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns `numbers.float() · scale`, element by element, rounded once."""
    rows, columns = numbers.shape
    whole = scales.float().repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
    return (numbers.float() * whole).to(dtype)


def quantised(matrix: Tensor, scale_type: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Returns numbers and scales of a matrix, block by block; the largest number of a block is below 448."""
    rows, columns = matrix.shape
    numbers = torch.empty(rows, columns, dtype=FP8)
    scales = torch.empty(-(-rows // 128), -(-columns // 128), dtype=scale_type)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            scales[i, j] = matrix[block].abs().max() / 391
            numbers[block] = (matrix[block] / scales[i, j].float()).to(FP8)
    return numbers, scales


def rewrite(
    model: Path, folder: Path, scale_type: torch.dtype = torch.float32, extra: dict[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Writes a model's directory again in block FP8, in two files with an index; returns all tensors of the files.

    Linear weights are quantised, as on the hub: not embedding, head, routers and norms.

    Args:
        model: A directory with a single file.
        folder: The new directory.
        scale_type: Type of the scales: float32 (DeepSeek-V3) or bfloat16 (Qwen3).
        extra: Tensors of no layer of the model.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(model / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            tensors[name], tensors[f"{name}_scale_inv"] = quantised(tensor.float(), scale_type)
        else:
            tensors[name] = tensor.to(torch.bfloat16)
    tensors |= extra or {}
    for file in model.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy2(file, folder / file.name)
    hf = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**hf, "quantization_config": CONFIG, "torch_dtype": "bfloat16"}))
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    # A matrix and its scales may lie in different files.
    for file_name, part in (("a.safetensors", names[::2]), ("b.safetensors", names[1::2])):
        save_file({name: tensors[name] for name in part}, folder / file_name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file_name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return tensors


def dequantised(tensors: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns the model's tensors of a block-FP8 checkpoint in another type."""
    return {
        name: values(tensor, tensors[f"{name}_scale_inv"], dtype) if tensor.dtype == FP8 else tensor.to(dtype)
        for name, tensor in tensors.items()
        if not name.endswith("_scale_inv")
    }


def extra_layer(layers: int, hidden: int, seed: int = 0) -> dict[str, Tensor]:
    """Returns a layer for multi-token prediction as in DeepSeek-V3, and tensors of another name for one."""
    generator = torch.Generator().manual_seed(seed)
    numbers, scales = quantised(torch.randn(2 * hidden + 3, hidden, generator=generator))
    prefix = f"model.layers.{layers}"
    return {
        f"{prefix}.eh_proj.weight": numbers,
        f"{prefix}.eh_proj.weight_scale_inv": scales,
        f"{prefix}.enorm.weight": torch.randn(hidden, generator=generator).to(torch.bfloat16),
        f"{prefix}.mlp.gate.e_score_correction_bias": torch.randn(5, generator=generator),
        "mtp.norm.weight": torch.randn(3, generator=generator).to(torch.bfloat16),
    }


def same_bits(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Returns True if two sets of tensors are equal in name, type, shape and every bit."""
    return set(a) == set(b) and all(
        a[n].dtype == b[n].dtype
        and a[n].shape == b[n].shape
        and torch.equal(a[n].contiguous().view(torch.uint8), b[n].contiguous().view(torch.uint8))
        for n in a
    )
