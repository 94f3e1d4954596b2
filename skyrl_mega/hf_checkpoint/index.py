"""Checks of a Hugging Face directory by file headers, before any process starts. Needs neither torch nor safetensors.

A safetensors file is 8 bytes of header length (little endian), a JSON header {name: {dtype, shape, data_offsets}}, and
data.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from skyrl_mega.common.errors import UserError
from skyrl_mega.common.safe_read import Malformed, check_folder, open_regular, parse_json, read_json
from skyrl_mega.models.registry import architecture

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Types allowed for a weight on disk → bytes."""
ALL_DTYPES = {**DTYPES, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1}
"""Types of known size, including types of unused tensors → bytes."""
FETCH = "fetch it again; model.path must be a Hugging Face directory"
LONGEST_HEADER = 100_000_000
"""Maximum length of a header in bytes, from the format's own definition."""


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in a file, as described by the header."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


def expected(path: Path) -> dict[str, tuple[int, ...]]:
    """Returns the tensors of the model in the directory's config.json: name → shape."""
    hf = read_config(path)
    return architecture(hf).tensors(hf)


def read_config(path: Path) -> dict[str, Any]:
    """Returns the content of config.json in the directory `path`.

    Raises:
        UserError: The file is missing or not valid JSON.
    """
    if not path.is_dir():
        what = "is no directory" if path.exists() else "is not there"
        raise UserError(
            f"{path} {what}; give a Hugging Face directory with config.json, *.safetensors and tokenizer.json",
            key="model.path",
        )
    hf = read_json(path / "config.json", FETCH)
    check_folder(path, FETCH)
    return hf


def check_files(path: Path, hf: Mapping[str, Any] | None = None) -> dict[str, TensorEntry]:
    """Checks that the directory contains every tensor of the architecture, complete; reads only headers.

    Returns the entry of each tensor.

    Raises:
        UserError: A tensor is missing or wrong; names file and tensor, and the expected and the actual value, in one
            line.
    """
    return check_tensors(path, expected(path) if hf is None else architecture(hf).tensors(hf))


def check_tensors(path: Path, tensors: Mapping[str, tuple[int, ...]]) -> dict[str, TensorEntry]:
    """Checks some of the tensors and opens only their files.

    Args:
        path: The directory.
        tensors: Name → shape of the tensors to check.

    Returns:
        The entry of each tensor.

    Raises:
        UserError: A tensor is missing, or has another shape or a type not supported.
    """
    file_of = _files(path, tensors)
    headers = {file: read_header(file) for file in sorted(set(file_of.values()))}
    entries: dict[str, TensorEntry] = {}
    for name, shape in tensors.items():
        file = file_of[name]
        entry = headers[file].get(name)
        if entry is None:
            raise UserError(f"tensor {name} is missing", key=file, fix="download or export the checkpoint again")
        if entry.shape != shape:
            raise UserError(
                f"tensor {name} has shape {list(entry.shape)}, config.json makes it {list(shape)}"
                "; the two are of different models",
                key=file,
            )
        if entry.dtype not in DTYPES:
            raise UserError(
                f"tensor {name} has type {entry.dtype}; allowed are {', '.join(DTYPES)}",
                key=file,
                fix="give a checkpoint without quantisation",
            )
        entries[name] = entry
    return entries


def names_in(path: Path) -> set[str]:
    """Returns all tensors in the directory's files, including tensors unknown to the model of config.json."""
    if (path / INDEX).exists():
        return set(read_json(path / INDEX, FETCH).get("weight_map") or ())
    return set(read_header(path / SINGLE))


def read_header(file: Path) -> dict[str, TensorEntry]:
    """Returns name → entry of the tensors in a file's header.

    Raises:
        UserError: The file is cut off or not in safetensors format.
    """
    try:
        size = os.path.getsize(file)
        with open_regular(file) as f:
            length = int.from_bytes(f.read(8), "little")
            if size < 8 or length > min(LONGEST_HEADER, size - 8):
                raise UserError(
                    f"{size} bytes, its header alone has {length}; the file is cut off or no "
                    "safetensors file, fetch it again",
                    key=file,
                )
            header = parse_json(f.read(length))
        header.pop("__metadata__", None)
        needed = 8 + length + _tiled(header)
        entries = {name: TensorEntry(file, str(v["dtype"]), tuple(v["shape"])) for name, v in header.items()}
    except OSError as error:
        raise UserError(
            f"cannot be read ({error.strerror})", key=file, fix="make it readable, fetch it again, or fix model.path"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"its header is no safetensors header ({error})", key=file, fix="fetch it again") from error
    if size != needed:
        raise UserError(f"{size} bytes, its header asks for {needed}; the file is cut off, fetch it again", key=file)
    return entries


def _tiled(header: Mapping[str, Any]) -> int:
    """Returns the bytes of all tensors; checks that tensors follow each other without gap or overlap, and match their
    shapes.

    Raises:
        Malformed: Tensors overlap, leave a gap, or have another size.
    """
    end = 0
    for name, tensor in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        (start, stop), shape, dtype = tensor["data_offsets"], tensor["shape"], tensor["dtype"]
        if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in (start, stop, *shape)):
            raise Malformed(f"tensor {name} has shape {shape} and offsets {start}, {stop}")
        if start != end or stop < start:
            raise Malformed(f"tensor {name} begins at {start}, where the one before ends at {end}")
        if dtype in ALL_DTYPES and stop - start != prod(shape) * ALL_DTYPES[dtype]:
            raise Malformed(f"tensor {name} of shape {shape} and type {dtype} has {stop - start} bytes")
        end = stop
    return end


def _files(path: Path, tensors: Mapping[str, Any]) -> dict[str, Path]:
    """Returns the file expected to hold each tensor."""
    index = path / INDEX
    if not index.exists():
        single = path / SINGLE
        if not single.exists():
            raise UserError(
                f"holds neither {SINGLE} nor {INDEX}", key=path, fix="give a directory with safetensors weights"
            )
        return dict.fromkeys(tensors, single)
    weight_map = read_json(index, FETCH).get("weight_map")
    if not isinstance(weight_map, dict):
        raise UserError("has no weight_map", key=index, fix="fetch it again")
    for name in tensors:
        if name not in weight_map:
            raise UserError(f"tensor {name} is missing", key=index, fix="download or export the checkpoint again")
        # A name in a file must not lead out of the directory.
        if Path(str(weight_map[name])).name != weight_map[name] or not weight_map[name].isprintable():
            raise UserError(f"{weight_map[name]!r} is no file name", key=index, fix="fetch it again")
    return {name: path / weight_map[name] for name in tensors}
