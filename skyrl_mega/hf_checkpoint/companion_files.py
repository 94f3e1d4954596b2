"""The files beside the weights of an exported Hugging Face directory: index, configuration, tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from skyrl_mega.hf_checkpoint.index import INDEX, read_header

COMPANION_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "LICENSE*")
"""Files of a Hugging Face directory copied with the weights: configuration, tokenizer, chat template, licence."""


def write_companion_files(folder: Path, source: Path, dtype: torch.dtype, fp8: bool = False) -> None:
    """Completes a directory of safetensors files: writes the index, copies configuration and tokenizer from `source`,
    and writes the type of the weights into the copied config.json. Existing files of these names are replaced.

    Args:
        folder: A directory with complete safetensors files; a single file gets no index.
        source: A Hugging Face directory.
        dtype: Type of the weights, written into config.json.
        fp8: True if the files are in the block FP8 of the source; otherwise config.json loses its quantization_config.

    Raises:
        UserError: A safetensors file cannot be read, or is cut off.
        OSError: `source` has no config.json, or a file cannot be copied or written.
        ValueError: config.json is not valid JSON.
    """
    headers = {file.name: read_header(file) for file in sorted(folder.glob("*.safetensors"))}
    if len(headers) > 1:
        weight_map = {tensor: file for file, header in headers.items() for tensor in header}
        nbytes = sum(entry.nbytes for header in headers.values() for entry in header.values())
        index = {"metadata": {"total_size": nbytes}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=1))
    for pattern in COMPANION_FILES:
        for file in source.glob(pattern):
            if file.is_file() and file.name != INDEX:
                shutil.copy2(file, folder / file.name)
    _describe(folder / "config.json", dtype, fp8)


def _describe(file: Path, dtype: torch.dtype, fp8: bool) -> None:
    """Writes the type of the weights into config.json, for loaders."""
    hf: dict[str, Any] = json.loads(file.read_text())
    name = str(dtype).removeprefix("torch.")
    keys = [key for key in ("dtype", "torch_dtype") if key in hf] or ["torch_dtype"]
    described = hf | dict.fromkeys(keys, name)
    if isinstance(text := hf.get("text_config"), dict):
        described["text_config"] = text | {key: name for key in ("dtype", "torch_dtype") if key in text}
    if not fp8:
        described.pop("quantization_config", None)
    if described != hf:
        file.write_text(json.dumps(described, indent=2) + "\n")
