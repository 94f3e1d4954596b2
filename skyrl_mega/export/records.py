"""The records of a distributed checkpoint: boxes of its tensors, each as `torch.save` writes a tensor.

That is a zip archive without compression, so any run of elements is one read. The archive's pickle is read with the
few names that it needs, so that nothing in it is executed.
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

from skyrl_mega.config.errors import UserError
from skyrl_mega.layout.box import Box

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
    except (OSError, EOFError, ValueError, LookupError, TypeError, pickle.PickleError, zipfile.BadZipFile) as error:
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


def read(record: Record, first: int, count: int, buffer: Tensor) -> Tensor:
    """Elements `first … first + count` of a located record, in C order; a view of `buffer` [count].

    Args:
        record: with `data`.
        first: element.
        count: how many.
        buffer: uint8, at least as long as they are; its start is overwritten.
    """
    size = count * record.dtype.itemsize
    into = buffer.numpy().data[:size]
    at, done, file = record.data + first * record.dtype.itemsize, 0, _opened(record.file)
    while done < size:
        got = os.preadv(file.fileno(), [into[done:]], at + done)
        if not got:
            raise UserError(f"{record}: ends before its data; the checkpoint has changed while it was read")
        done += got
    return buffer[:size].view(record.dtype)


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
