"""Checks of a Hugging Face directory by file headers, before any process starts. Needs neither torch nor safetensors.

A safetensors file is 8 bytes of header length (little endian), a JSON header {name: {dtype, shape, data_offsets}}, and
data.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from skyrl_mega.common.errors import UserError
from skyrl_mega.common.safe_read import Malformed, check_folder, open_regular, parse_json, read_json
from skyrl_mega.models.disk_form import disk_shapes
from skyrl_mega.models.huggingface import is_computed, is_in_layers
from skyrl_mega.models.huggingface import tensors as model_tensors
from skyrl_mega.models.quantization import (
    BLOCK,
    MXFP4_BLOCK,
    MXFP4_BLOCKS,
    MXFP4_SCALES,
    SCALE_SUFFIX,
    BlockFp8,
    block_fp8,
    mxfp4,
)
from skyrl_mega.models.registry import ARCHITECTURES, architecture

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Types allowed for a weight on disk → bytes."""
ALL_DTYPES = {**DTYPES, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1}
"""Types of known size, including types of unused tensors → bytes."""
FP8_DTYPE = "F8_E4M3"
"""Type of the matrices of a block-FP8 checkpoint."""
MXFP4_DTYPE = "U8"
"""Type of the blocks and scales of an MXFP4 checkpoint."""
FETCH = "fetch it again; model.path must be a Hugging Face directory"
LONGEST_HEADER = 100_000_000
"""Maximum length of a header in bytes, from the format's own definition."""


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in a file, as described by the header."""

    file: Path
    dtype: str
    """Name of the type in safetensors, such as `BF16`."""
    shape: tuple[int, ...]
    offset: int
    """First byte in the file."""
    nbytes: int
    """Bytes of the data."""
    scales: TensorEntry | None = None
    """Scales of a matrix in block FP8, [blocks of rows, blocks of columns], or of blocks in MXFP4."""


def read_config(path: Path) -> dict[str, Any]:
    """Returns the content of config.json in the Hugging Face directory `path`, with the form of its files (`of_files`).

    Raises:
        UserError: The directory or the file is missing, a file of the directory is not regular, or config.json or the
            index of the files is not a JSON object.
    """
    if not path.is_dir():
        what = "is no directory" if path.exists() else "is not there"
        raise UserError(
            f"{path} {what}; give a Hugging Face directory with config.json, *.safetensors and tokenizer.json",
            key="model.path",
        )
    hf = read_json(path / "config.json", FETCH)
    check_folder(path, FETCH)
    return of_files(path, hf)


def of_files(path: Path, hf: dict[str, Any]) -> dict[str, Any]:
    """Returns the content of config.json with the form of the files in the directory, for families with several forms
    (`Architecture.in_files`); unchanged for other families, and without files.

    Raises:
        UserError: The names of the tensors cannot be read.
    """
    family = ARCHITECTURES.get(str(hf.get("model_type", "")))
    if family is None or family.in_files is None or not any((path / name).exists() for name in (INDEX, SINGLE)):
        return hf
    return dict(family.in_files(hf, names_in(path)))


def check_files(path: Path, hf: Mapping[str, Any] | None = None) -> dict[str, TensorEntry]:
    """Checks that the directory contains every tensor of the model, complete. Reads only headers.

    Args:
        path: The Hugging Face directory.
        hf: The content of config.json; None reads the file.

    Returns:
        Name → entry of each tensor of the model.

    Raises:
        UserError: config.json cannot be used, a tensor is missing or wrong, or a layer of the model has a tensor
            unknown to the architecture; names file and tensor, and the expected and the actual value, in one line.
    """
    hf = read_config(path) if hf is None else hf
    entries = check_model_tensors(path, hf, architecture(hf).tensors(hf))
    unread_tensors(path, hf)
    return entries


def check_model_tensors(
    path: Path, hf: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]]
) -> dict[str, TensorEntry]:
    """Checks tensors of the model of config.json as `check_tensors` does, in the form and quantisation of the files.

    Args:
        path: The directory.
        hf: The content of config.json.
        tensors: Name → shape of the global tensor, of the tensors to check.

    Returns:
        Name → entry of each tensor. The entry of a tensor in MXFP4 is that of the blocks, and contains the entry of the
        scales.

    Raises:
        UserError: config.json is not supported, or as in `check_tensors`.
    """
    forms = architecture(hf).describe(hf).disk_forms
    packed = {name for name in tensors if name in forms and forms[name].packed and mxfp4(hf)}
    plain = {name: shape for name, shape in tensors.items() if name not in packed}
    entries = check_tensors(path, disk_shapes(plain, forms), block_fp8(hf))
    shapes: dict[str, tuple[int, ...]] = {}
    for name in packed:
        experts, *rows, width = tensors[name]
        scales = (experts, prod(rows), width // MXFP4_BLOCK)
        shapes |= {name + MXFP4_SCALES: scales, name + MXFP4_BLOCKS: (*scales, MXFP4_BLOCK // 2)}
    stored = _entries(path, shapes)
    for name, entry in stored.items():
        _check_shape(name, entry, shapes[name])
        if entry.dtype != MXFP4_DTYPE:
            raise _mixed(f"tensor {name} has type {entry.dtype}; MXFP4 has {MXFP4_DTYPE}", entry.file)
    return entries | {n: replace(stored[n + MXFP4_BLOCKS], scales=stored[n + MXFP4_SCALES]) for n in packed}


def check_tensors(
    path: Path, tensors: Mapping[str, tuple[int, ...]], quantisation: BlockFp8 | None = None
) -> dict[str, TensorEntry]:
    """Checks that these tensors are in the directory's files with the right shape and a supported type.

    Opens only files with these tensors, and reads only headers.

    Args:
        path: The directory.
        tensors: Name → expected shape of the tensors to check.
        quantisation: Quantisation according to config.json; None refuses matrices in FP8.

    Returns:
        Name → entry of each tensor; the entry of a matrix in block FP8 contains the entry of its scales.

    Raises:
        UserError: A tensor or its scales are missing, are of another shape, or are of a type not supported; or a file
            cannot be read or is cut off.
    """
    entries = _entries(path, tensors)
    fp8 = {name for name, entry in entries.items() if quantisation and entry.dtype == FP8_DTYPE}
    for name, entry in entries.items():
        _check_shape(name, entry, tensors[name])
        if entry.dtype not in DTYPES and name not in fp8:
            missing = "; config.json has no quantization_config" if entry.dtype == FP8_DTYPE else ""
            raise UserError(
                f"tensor {name} has type {entry.dtype}; allowed are {', '.join(DTYPES)}{missing}",
                key=entry.file,
                fix="give a checkpoint without quantisation, or in block FP8",
            )
    shapes = {name + SCALE_SUFFIX: tuple(-(-n // BLOCK) for n in tensors[name]) for name in entries if name in fp8}
    for name, entry in check_tensors(path, shapes).items() if shapes else ():
        matrix = name.removesuffix(SCALE_SUFFIX)
        if len(entry.shape) != 2:
            raise UserError(
                f"tensor {matrix} has type {FP8_DTYPE}, which is read for matrices only",
                key=entry.file,
                fix="give a checkpoint in BF16",
            )
        entries[matrix] = replace(entries[matrix], scales=entry)
    return entries


def _check_shape(name: str, entry: TensorEntry, shape: tuple[int, ...]) -> None:
    if entry.shape != shape:
        raise _mixed(f"tensor {name} has shape {list(entry.shape)}, config.json makes it {list(shape)}", entry.file)


def _mixed(problem: str, key: Path) -> UserError:
    """Returns the error for files and a config.json of different models."""
    fix = "fetch config.json and the weights of one model"
    return UserError(f"{problem}; the two are of different models", key=key, fix=fix)


def unread_tensors(path: Path, hf: Mapping[str, Any]) -> dict[str, TensorEntry]:
    """Returns name → entry of the tensors in the directory's files that belong to no layer and no other part of the
    model, such as layers for multi-token prediction. A run does not read these tensors; an export copies them.

    The result is {} without such tensors, and for a directory without weights.

    Args:
        path: The directory.
        hf: The content of config.json.

    Raises:
        UserError: config.json is not supported; a layer of the model has a tensor unknown to the architecture, so
            config.json is of another model; or the index, or a file with such tensors, cannot be read or is cut off.
    """
    if not (path / INDEX).exists() and not (path / SINGLE).exists():
        return {}
    decoder = architecture(hf).describe(hf)
    read = model_tensors(decoder)
    if block_fp8(hf):
        read |= {name + SCALE_SUFFIX: () for name in read}
    if mxfp4(hf):
        read |= {name + suffix: () for name in decoder.disk_forms for suffix in (MXFP4_BLOCKS, MXFP4_SCALES)}
    unread = [name for name in names_in(path) if name not in read and not is_computed(decoder, name)]
    for name in sorted(unread):
        if is_in_layers(decoder, name):
            raise _mixed(f"tensor {name} is unknown to a {hf.get('model_type')} model with this config.json", path)
    return _entries(path, sorted(unread)) if unread else {}


def _entries(path: Path, names: Collection[str]) -> dict[str, TensorEntry]:
    """Returns the entries of tensors, from the headers of their files.

    Raises:
        UserError: A tensor is missing.
    """
    file_of = _files(path, names)
    headers = {file: read_header(file) for file in sorted(set(file_of.values()))}
    for name in names:
        if name not in headers[file_of[name]]:
            raise UserError(
                f"tensor {name} is missing", key=file_of[name], fix="download or export the checkpoint again"
            )
    return {name: headers[file_of[name]][name] for name in names}


def names_in(path: Path) -> set[str]:
    """Returns the names of all tensors in the directory's files, including tensors unknown to the model and scales.
    With an index, as the index lists them: the files are not opened.

    Raises:
        UserError: The index cannot be read; or, without an index, `SINGLE` is missing or cannot be read.
    """
    weight_map = _weight_map(path)
    return set(read_header(path / SINGLE)) if weight_map is None else set(weight_map)


def read_header(file: Path) -> dict[str, TensorEntry]:
    """Returns name → entry of the tensors in a safetensors file, from the header; checks the file's size.

    Raises:
        UserError: The file cannot be read, is cut off, or is not in safetensors format.
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
        entries = {name: _entry(file, 8 + length, value) for name, value in header.items()}
    except OSError as error:
        raise UserError(
            f"cannot be read ({error.strerror})", key=file, fix="make it readable, fetch it again, or fix model.path"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"its header is no safetensors header ({error})", key=file, fix="fetch it again") from error
    if size != needed:
        raise UserError(f"{size} bytes, its header asks for {needed}; the file is cut off, fetch it again", key=file)
    return entries


def header_bytes(table: Mapping[str, Any], multiple: int = 8) -> bytes:
    """Returns the first bytes of a safetensors file: the length of the table, and the table.

    Args:
        table: Tensor → dtype, shape and offsets.
        multiple: Length of the result is a multiple of this number of bytes; itself a multiple of 8.
    """
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % multiple)
    return len(text).to_bytes(8, "little") + text


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


def _entry(file: Path, start: int, value: Mapping[str, Any]) -> TensorEntry:
    """Returns a tensor's entry from its description in the header; `start` is the first byte after the header."""
    begin, end = value["data_offsets"]
    return TensorEntry(file, str(value["dtype"]), tuple(value["shape"]), start + begin, end - begin)


def _files(path: Path, tensors: Collection[str]) -> dict[str, Path]:
    """Returns the file expected to hold each tensor."""
    weight_map = _weight_map(path)
    if weight_map is None:
        single = path / SINGLE
        if not single.exists():
            raise UserError(
                f"holds neither {SINGLE} nor {INDEX}", key=path, fix="give a directory with safetensors weights"
            )
        return dict.fromkeys(tensors, single)
    for name in tensors:
        if name not in weight_map:
            raise UserError(
                f"tensor {name} is missing", key=path / INDEX, fix="download or export the checkpoint again"
            )
        # A name in a file must not lead out of the directory.
        if Path(str(weight_map[name])).name != weight_map[name] or not weight_map[name].isprintable():
            raise UserError(f"{weight_map[name]!r} is no file name", key=path / INDEX, fix="fetch the index again")
    return {name: path / weight_map[name] for name in tensors}


def _weight_map(path: Path) -> dict[str, Any] | None:
    """Returns tensor → file of a directory with an index; None without an index.

    Raises:
        UserError: The index has no such mapping.
    """
    if not (path / INDEX).exists():
        return None
    weight_map = read_json(path / INDEX, FETCH).get("weight_map")
    if not isinstance(weight_map, dict):
        raise UserError("has no weight_map", key=path / INDEX, fix="fetch the file again")
    return weight_map
