"""The files of a distributed checkpoint (torch.distributed.checkpoint's), read without a process group.

`.metadata` says which box of which tensor lies in which bytes of which file. Such a *record* is what `torch.save`
writes, a zip archive without compression, so any rows of it are one read. Nothing that a checkpoint brings along is
executed: both pickles in it are read with the few names that they need.
"""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections import OrderedDict
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from skyrl_mega.config.errors import UserError
from skyrl_mega.layout.box import Box

METADATA = ".metadata"
COMPLETE = "metadata.json"
"""megatron-core writes it last."""

_PACKAGE = "torch.distributed.checkpoint."
_NAMES = {
    (_PACKAGE + "metadata", "Metadata"),
    (_PACKAGE + "metadata", "TensorStorageMetadata"),
    (_PACKAGE + "metadata", "BytesStorageMetadata"),
    (_PACKAGE + "metadata", "ChunkStorageMetadata"),
    (_PACKAGE + "metadata", "TensorProperties"),
    (_PACKAGE + "metadata", "_MEM_FORMAT_ENCODING"),
    (_PACKAGE + "metadata", "MetadataIndex"),
    (_PACKAGE + "metadata", "StorageMeta"),
    (_PACKAGE + "planner", "SavePlan"),
    (_PACKAGE + "planner", "WriteItem"),
    (_PACKAGE + "planner", "WriteItemType"),
    (_PACKAGE + "planner", "TensorWriteData"),
    (_PACKAGE + "planner", "BytesIOWriteData"),
    (_PACKAGE + "filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
}
"""What `.metadata` may name, besides torch's types of numbers."""
_STORAGES = {"FloatStorage": torch.float32, "BFloat16Storage": torch.bfloat16, "HalfStorage": torch.float16}
"""What `torch.save` calls the types of a weight."""


@dataclass(frozen=True)
class Record:
    """A box of a stored tensor, and where it lies."""

    key: str
    box: Box
    dtype: torch.dtype
    file: Path
    offset: int
    """First byte of the archive in the file."""
    length: int
    """Bytes of the archive."""
    data: int = -1
    """First byte of the elements in the file, once `locate` has found it; they are in C order."""
    crc: int = 0
    """CRC-32 of the elements' bytes, as written beside them (with `data`)."""

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.box.numel * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.file} at byte {self.offset} ({self.key})"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the checkpoint and the records that it is made of."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    records: tuple[Record, ...]


def read_metadata(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a distributed checkpoint, by key.

    Raises:
        UserError: it is not whole: the file that is missing or cut off is named.
    """
    for name in (METADATA, COMPLETE):
        if not (folder / name).is_file():
            raise UserError(f"{folder}: has no {name}; it is no distributed checkpoint, or its save was interrupted")
    file = folder / METADATA
    try:
        with file.open("rb") as opened:
            found = _Metadata(opened).load()
        if not isinstance(found, Metadata):
            raise pickle.UnpicklingError(f"it holds a {type(found).__name__}")
        tensors = {
            key: _tensor(folder, found, key, value)
            for key, value in found.state_dict_metadata.items()
            if isinstance(value, TensorStorageMetadata)
        }
    except (OSError, EOFError, ValueError, KeyError, AttributeError, TypeError, pickle.UnpicklingError) as error:
        raise UserError(f"{file}: cannot be read ({error}); take another checkpoint") from error
    _check_sizes(tensors)
    return tensors


def _tensor(folder: Path, metadata: Metadata, key: str, value: TensorStorageMetadata) -> StoredTensor:
    records = []
    for chunk in value.chunks:
        info = metadata.storage_data[MetadataIndex(key, chunk.offsets)]
        if Path(info.relative_path).name != info.relative_path or info.transform_descriptors:
            raise ValueError(f"{key} lies in {info.relative_path!r}, which is no plain file of the folder")
        box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
        file = folder / info.relative_path
        records.append(Record(key, box, value.properties.dtype, file, info.offset, info.length))
    return StoredTensor(tuple(value.size), value.properties.dtype, tuple(records))


def _check_sizes(tensors: dict[str, StoredTensor]) -> None:
    """Every file is as long as its records need."""
    needed: dict[Path, int] = {}
    for tensor in tensors.values():
        for record in tensor.records:
            needed[record.file] = max(needed.get(record.file, 0), record.offset + record.length)
    for file, size in sorted(needed.items()):
        if not file.is_file():
            raise UserError(f"{file}: is missing; the checkpoint is not whole, take another one")
        if (there := file.stat().st_size) < size:
            raise UserError(
                f"{file}: {there} bytes, .metadata asks for {size}; the file is cut off, take another checkpoint"
            )


def locate(record: Record) -> tuple[int, int]:
    """First byte in the file of the record's elements, and their CRC-32.

    Raises:
        UserError: the record is not what `.metadata` says, or its elements are not in C order.
    """
    try:
        view = io.BufferedReader(_View(record.file, record.offset, record.length), 4096)
        with view, zipfile.ZipFile(view) as archive:
            entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
            name = archive.infolist()[0].filename.partition("/")[0]
            shape = _Shape(io.BytesIO(archive.read(f"{name}/data.pkl"))).load()
            if not isinstance(shape, _Saved):
                raise ValueError("it is no tensor")
            entry = entries[f"data/{shape.storage}"]
            view.seek(entry.header_offset + 26)
            lengths = view.read(4)
    except (OSError, EOFError, ValueError, KeyError, TypeError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
        raise UserError(f"{record}: is damaged ({error}); take another checkpoint") from error
    expected = _Saved(shape.storage, record.dtype, 0, record.box.shape, _c_order(record.box.shape))
    if (
        shape.normal() != expected.normal()
        or entry.file_size != record.nbytes
        or entry.compress_type != zipfile.ZIP_STORED
    ):
        raise UserError(f"{record}: is {shape}, .metadata says {expected}; take another checkpoint")
    # A local file header is 30 bytes, a name and an extra field, whose lengths stand at its end.
    beside = int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
    return record.offset + entry.header_offset + 30 + beside, entry.CRC


def read(record: Record, first: int, count: int, scratch: Tensor) -> Tensor:
    """Elements `first … first + count` of a located record, in C order; a view of `scratch` [count].

    Args:
        record: with `data`.
        first: element.
        count: how many.
        scratch: uint8, at least as long as they are.
    """
    size = count * record.dtype.itemsize
    into = scratch.numpy().data[:size]
    at, done, file = record.data + first * record.dtype.itemsize, 0, _opened(record.file)
    while done < size:
        got = os.preadv(file.fileno(), [into[done:]], at + done)
        if not got:
            raise UserError(f"{record}: ends before its data; the checkpoint has changed while it was read")
        done += got
    return scratch[:size].view(record.dtype)


@lru_cache(maxsize=256)
def _opened(file: Path) -> io.FileIO:
    """An open file; the least recently used one is closed when it falls out."""
    return open(file, "rb", buffering=0)


class _View(io.RawIOBase):
    """Some bytes of a file, as a file."""

    def __init__(self, file: Path, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = _opened(file), start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        self._at = base + offset
        if self._at < 0:
            raise ValueError("seek before the start")
        return self._at

    def readinto(self, buffer: Any) -> int:
        into = memoryview(buffer)[: max(0, self._length - self._at)]
        got = os.preadv(self._file.fileno(), [into], self._start + self._at) if len(into) else 0
        self._at += got
        return got


class _Metadata(pickle.Unpickler):
    """Reads `.metadata`."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _NAMES or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")


@dataclass(frozen=True)
class _Saved:
    """What `torch.save` says of a tensor, without its elements."""

    storage: str
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def normal(self) -> tuple[Any, ...]:
        """The same without the strides of dimensions that have one entry, which say nothing."""
        strides = tuple(step for step, size in zip(self.stride, self.shape, strict=True) if size > 1)
        return self.storage, self.dtype, self.offset, self.shape, strides


class _Shape(pickle.Unpickler):
    """Reads what `torch.save` pickles of a tensor, and not the tensor."""

    def persistent_load(self, pid: Any) -> tuple[str, torch.dtype]:
        _, dtype, key, *_ = pid
        return str(key), dtype

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuild
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no weight needs")


def _rebuild(storage: tuple[str, torch.dtype], offset: int, size: Any, stride: Any, *_: Any) -> _Saved:
    return _Saved(storage[0], storage[1], offset, tuple(size), tuple(stride))


def _c_order(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
