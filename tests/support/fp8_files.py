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
PLAIN = ("embed_tokens.weight", "head.weight", "gate.weight")
"""Endings of the names of matrices that stay in BF16: embedding, heads, routers."""
CORRECTION_BIAS = "e_score_correction_bias"
"""Ending of the name of a router's correction bias, which stays in float32."""


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


def in_block_fp8(tensors: dict[str, Tensor], scale_type: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Returns tensors as on the hub: linear weights in block FP8 with scales, correction biases in float32, others in
    BF16."""
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and not name.endswith(PLAIN):
            stored[name], stored[f"{name}_scale_inv"] = quantised(tensor.float(), scale_type)
        else:
            stored[name] = tensor.to(torch.float32 if name.endswith(CORRECTION_BIAS) else torch.bfloat16)
    return stored


def rewrite(
    model: Path, folder: Path, scale_type: torch.dtype = torch.float32, extra: dict[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Writes a model's directory again in block FP8, in two files with an index; returns all tensors of the files.

    Args:
        model: A directory with a single file.
        folder: The new directory.
        scale_type: Type of the scales: float32 (DeepSeek-V3) or bfloat16 (Qwen3).
        extra: Tensors of no layer of the model.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = in_block_fp8(load_file(model / "model.safetensors"), scale_type) | (extra or {})
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
    """Returns the model's tensors of a block-FP8 checkpoint in another type; correction biases stay in float32."""
    plain: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dtype == FP8:
            plain[name] = values(tensor, tensors[f"{name}_scale_inv"], dtype)
        elif not name.endswith("_scale_inv"):
            plain[name] = tensor if name.endswith(CORRECTION_BIAS) else tensor.to(dtype)
    return plain


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


def prediction_layer(model: Path) -> dict[str, Tensor]:
    """Returns a layer for multi-token prediction as in DeepSeek-V3's files: a decoder layer after the last, with
    embedding, head, norms and a projection, in block FP8.

    Args:
        model: The model's directory, with a single file.
    """
    tensors = load_file(model / "model.safetensors")
    layers = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    last, prefix = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    layer = {name.replace(last, prefix): 1.5 * tensor for name, tensor in tensors.items() if name.startswith(last)}
    embedding, norm = tensors["model.embed_tokens.weight"], tensors["model.norm.weight"]
    layer |= {f"{prefix}{name}.weight": embedding for name in ("embed_tokens", "shared_head.head")}
    layer |= {f"{prefix}{name}.weight": norm for name in ("enorm", "hnorm", "shared_head.norm")}
    layer[f"{prefix}eh_proj.weight"] = torch.randn(len(norm), 2 * len(norm), generator=torch.Generator().manual_seed(0))
    return in_block_fp8(layer)


def same_bits(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Returns True if two sets of tensors are equal in name, type, shape and every bit."""
    return set(a) == set(b) and all(
        a[n].dtype == b[n].dtype
        and a[n].shape == b[n].shape
        and torch.equal(a[n].contiguous().view(torch.uint8), b[n].contiguous().view(torch.uint8))
        for n in a
    )
