"""Tensors of a source unknown to the model, copied into an export bit for bit, in files of their own.

Layers for multi-token prediction are an example. A source in block FP8 keeps the numbers and scales of such tensors.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from skyrl_mega.common.groups import groups
from skyrl_mega.common.safe_read import open_regular, writing
from skyrl_mega.hf_checkpoint.index import (
    ALL_DTYPES,
    TensorEntry,
    header_bytes,
    read_config,
    read_header,
    unread_tensors,
)

CHUNK_BYTES = 16 << 20
"""Bytes read and written at a time."""

_GROUP = re.compile(r"^(.*?\.\d+|[^.]*)\..*$")
"""A tensor's name; the group is the beginning up to the first number, such as `model.layers.61`."""

Copied = Mapping[str, TensorEntry]
"""The tensors of a file, with their places in the source."""


def copies(source: Path, file_bytes: int) -> list[Copied]:
    """Returns the tensors in a Hugging Face directory that the model does not have, divided over files to write: an
    entry per file, [] without such tensors. Reads only headers, and writes nothing (`write_copy` does).

    Args:
        source: The directory.
        file_bytes: Maximum size of a file (at least one tensor).

    Raises:
        UserError: config.json cannot be used, a layer of the model has an unknown tensor, or a file cannot be read.
    """
    unread = unread_tensors(source, read_config(source))
    files = groups(unread, lambda name: unread[name].nbytes, file_bytes)
    return [_aligned({name: unread[name] for name in names}) for names in files]


def unread_note(path: Path, hf: Mapping[str, Any]) -> str | None:
    """Returns a sentence about the tensors of a Hugging Face directory that a run leaves unread: number, size and
    names. None without such tensors.

    Args:
        path: The directory.
        hf: The content of its config.json.

    Raises:
        UserError: A layer of the model has an unknown tensor, or a file cannot be read.
    """
    unread = unread_tensors(path, hf)
    if not unread:
        return None
    groups = list(dict.fromkeys(_GROUP.sub(r"\1.*", name) for name in unread))
    listed = ", ".join(groups[:5]) + (", …" if len(groups) > 5 else "")
    nbytes = sum(entry.nbytes for entry in unread.values())
    size = f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.3g} MB"
    return (
        f"{len(unread)} tensors ({size}) are of no layer of the model: {listed}; they stay unread, and "
        "an export copies them"
    )


def write_copy(tensors: Copied, file: Path) -> None:
    """Writes a new safetensors file with copies of the tensors, and flushes the file to the disk.

    Args:
        tensors: The tensors, with their places in the source.
        file: The file to write.

    Raises:
        OSError: The file exists already, the file system failed, or a file of the source is missing or ends too early.
            An incomplete file stays.
    """
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, entry in tensors.items():
        table[name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [end, end + entry.nbytes]}
        end += entry.nbytes
    with writing(file), file.open("xb") as opened:
        opened.write(header_bytes(table))
        for entry in tensors.values():
            for chunk in _chunks(entry):
                opened.write(chunk)
        opened.flush()
        os.fsync(opened.fileno())


def is_copy(tensors: Copied, file: Path) -> bool:
    """Returns True if `file` contains exactly these tensors, in order, equal to the source byte by byte; False for any
    other safetensors file.

    Args:
        tensors: The tensors, with their places in the source.
        file: The file to compare.

    Raises:
        UserError: `file` is missing, cut off, or not in safetensors format.
        OSError: A file of the source cannot be read or ends too early.
    """
    header = read_header(file)
    return list(header) == list(tensors) and all(
        (written := header[name]).dtype == entry.dtype
        and written.shape == entry.shape
        and all(a == b for a, b in zip(_chunks(written), _chunks(entry), strict=True))
        for name, entry in tensors.items()
    )


def _aligned(tensors: Copied) -> Copied:
    """Returns the tensors with wide types first, so that every tensor begins at a multiple of its type's size."""
    return dict(sorted(tensors.items(), key=lambda item: -ALL_DTYPES.get(item[1].dtype, 1)))


def _chunks(entry: TensorEntry) -> Iterator[bytes]:
    """Yields a tensor's bytes."""
    with open_regular(entry.file) as opened:
        opened.seek(entry.offset)
        for start in range(0, entry.nbytes, CHUNK_BYTES):
            size = min(CHUNK_BYTES, entry.nbytes - start)
            if len(data := opened.read(size)) != size:
                raise OSError(f"{entry.file} ends before the data of a tensor; fetch the model directory again")
            yield data
