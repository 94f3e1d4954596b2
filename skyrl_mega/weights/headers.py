"""Checks a Hugging Face directory by its files' headers, before any process starts. Needs neither torch nor
safetensors.

A safetensors file is 8 bytes of header length (little endian), a JSON header {name: {dtype, shape, data_offsets}},
and data.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl_mega.config.errors import UserError
from skyrl_mega.models.registry import architecture

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Types that a weight may have on disk → bytes."""
LONGEST_HEADER = 100_000_000
"""Bytes; the format's own limit. A longer one is no safetensors file."""


@dataclass(frozen=True)
class Entry:
    """A tensor of a file, as the header has it."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


def expected(path: Path) -> dict[str, tuple[int, ...]]:
    """The tensors that the directory's config.json promises: name → shape."""
    hf = read_config(path)
    return architecture(hf).tensors(hf)


def read_config(path: Path) -> dict[str, Any]:
    """The content of config.json. UserError when it is not there or not JSON."""
    if not path.is_dir():
        raise UserError(f"model.path: {path} is no directory; give a Hugging Face directory with config.json")
    return _json(path / "config.json")


def check_files(path: Path, hf: Mapping[str, Any] | None = None) -> dict[str, Entry]:
    """Verifies that the directory holds every tensor of its architecture, whole; reads headers only.

    Returns where each tensor is.

    Raises:
        UserError: one line: file, tensor, what is expected and what was found.
    """
    return check_tensors(path, expected(path) if hf is None else architecture(hf).tensors(hf))


def check_tensors(path: Path, tensors: Mapping[str, tuple[int, ...]]) -> dict[str, Entry]:
    """The same for a part of the tensors: name → shape; opens only the files they are in."""
    where = _files(path, tensors)
    headers = {file: read_header(file) for file in sorted(set(where.values()))}
    found: dict[str, Entry] = {}
    for name, shape in tensors.items():
        file = where[name]
        entry = headers[file].get(name)
        if entry is None:
            raise UserError(f"{file}: tensor {name} is missing; download or export the checkpoint again")
        if entry.shape != shape:
            raise UserError(
                f"{file}: tensor {name} has shape {list(entry.shape)}, config.json makes it {list(shape)}; "
                "the two are of different models"
            )
        if entry.dtype not in DTYPES:
            raise UserError(
                f"{file}: tensor {name} has type {entry.dtype}; allowed are {', '.join(DTYPES)}; "
                "give a checkpoint without quantisation"
            )
        found[name] = entry
    return found


def read_header(file: Path) -> dict[str, Entry]:
    """The tensors of one file, from its header; UserError when the file is cut off or no safetensors file."""
    try:
        size = os.path.getsize(file)
        with open(file, "rb") as f:
            length = int.from_bytes(f.read(8), "little")
            if size < 8 or length > min(LONGEST_HEADER, size - 8):
                raise UserError(
                    f"{file}: {size} bytes, its header alone has {length}; the file is cut off or no safetensors file, "
                    "fetch it again"
                )
            header = json.loads(f.read(length))
        header.pop("__metadata__", None)
        needed = 8 + length + max((int(v["data_offsets"][1]) for v in header.values()), default=0)
        entries = {name: Entry(file, str(v["dtype"]), tuple(v["shape"])) for name, v in header.items()}
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror}); fetch it again or fix model.path") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file}: its header is no safetensors header ({error}); fetch it again") from error
    if size != needed:
        raise UserError(f"{file}: {size} bytes, its header asks for {needed}; the file is cut off, fetch it again")
    return entries


def _files(path: Path, tensors: Mapping[str, Any]) -> dict[str, Path]:
    """Tensor → the file that should hold it."""
    index = path / INDEX
    if not index.exists():
        single = path / SINGLE
        if not single.exists():
            raise UserError(f"{path}: holds neither {SINGLE} nor {INDEX}; give a directory with safetensors weights")
        return dict.fromkeys(tensors, single)
    weight_map = _json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise UserError(f"{index}: has no weight_map; fetch it again")
    for name in tensors:
        if name not in weight_map:
            raise UserError(f"{index}: tensor {name} is missing; download or export the checkpoint again")
        # A name from a file must not lead out of the directory.
        if Path(str(weight_map[name])).name != weight_map[name]:
            raise UserError(f"{index}: {weight_map[name]!r} is no file name; fetch it again")
    return {name: path / weight_map[name] for name in tensors}


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
    except FileNotFoundError:
        raise UserError(f"{file}: is missing; model.path must be a Hugging Face directory") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read as JSON ({error}); fetch it again") from error
    if not isinstance(content, dict):
        raise UserError(f"{file}: is no JSON object; fetch it again")
    return content
