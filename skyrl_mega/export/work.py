"""The work of an export's worker: writing and comparing batches of rows."""

from __future__ import annotations

import io
import os
import zlib
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from skyrl_mega.common.safe_read import writing
from skyrl_mega.export.job import ExportJob, overlapping_entries
from skyrl_mega.hf_checkpoint.box_files import MASTER, BoxEntry, compare, read_into
from skyrl_mega.parallel.box import Box


class ExportMismatch(RuntimeError):
    """Written data differs from the checkpoint."""


class ReadRows(NamedTuple):
    """Rows read from an entry, contiguous in the entry's file."""

    entry: int
    """Index of the entry in the job."""
    row: int
    nbytes: int
    crc: int
    """CRC-32 of the bytes."""


class ExportWorker:
    """A process's part of an export. Keeps nothing but two buffers of `job.buffer_bytes`.

    Args:
        job: The plan.
        folder: Folder of the files being written.
    """

    def __init__(self, job: ExportJob, folder: Path) -> None:
        self.job, self.folder = job, folder
        self._out = torch.empty(job.buffer_bytes, dtype=torch.uint8)
        self._scratch = torch.empty(job.buffer_bytes, dtype=torch.uint8)

    def write(self, index: int) -> tuple[int, list[ReadRows]]:
        """Writes a batch; returns the bytes written, and checksums of the data read."""
        job, batch = self.job, self.job.batches[index]
        pieces: list[ReadRows] = []
        file, at = job.files[batch.file], 0
        for slab in batch.slabs:
            shape = (slab.rows, *job.shapes[slab.tensor][1:])
            dtype = job.type_of(slab.tensor)
            size = prod(shape) * dtype.itemsize
            rows = self._out[at : at + size].view(dtype).view(shape)
            for number, box in overlapping_entries(job, slab):
                entry = job.entries[number]
                into = rows[Box((box.start[0] - slab.first, *box.start[1:]), box.shape).slices()]
                # Direct read: nothing to convert or scatter.
                if (
                    entry.dtype == dtype
                    and not (entry.kind == MASTER and dtype != job.intermediate)
                    and into.is_contiguous()
                ):
                    read_into(_opened(entry.file).fileno(), entry, box, _bytes(into))
                    saved = into
                else:
                    saved = self._read_saved(entry, box)
                    into.copy_(self._exported_values(entry, saved))
                data = _bytes(saved)
                pieces.append(ReadRows(number, box.start[0], len(data), zlib.crc32(data)))
            at += size
        first = batch.slabs[0]
        width = prod(job.shapes[first.tensor][1:]) * job.type_of(first.tensor).itemsize
        with writing(self.folder / file.name), open(self.folder / file.name, "r+b", buffering=0) as opened:
            _write(opened.fileno(), self._out.numpy().data[:at], file.offsets[first.tensor] + first.first * width)
        return at, pieces

    def flush(self, index: int) -> int:
        """Flushes a file to the disk."""
        path = self.folder / self.job.files[index].name
        with writing(path), open(path, "rb") as opened:
            os.fsync(opened.fileno())
        return 0

    def compare(self, index: int) -> int:
        """Compares an entry with the files as read by safetensors, bit by bit; returns the number of elements
        compared.

        The entry's own bytes are compared with the saved CRC-32.

        Raises:
            ExportMismatch: The files differ; names the tensor and the entry.
            Damaged: The entry differs from the saved state.
        """
        job, entry = self.job, self.job.entries[index]
        file, crc = self.folder / self._file(entry.tensor), 0
        step = max(1, len(self._scratch) // (prod(entry.box.shape[1:]) * entry.dtype.itemsize))
        for row in range(0, entry.box.shape[0], step):
            rows = min(step, entry.box.shape[0] - row)
            box = Box((entry.box.start[0] + row, *entry.box.start[1:]), (rows, *entry.box.shape[1:]))
            with safe_open(str(file), framework="pt") as opened:  # reopened, else more and more of the file is mapped
                exported = opened.get_slice(entry.tensor)[box.slices()]
            saved = self._read_saved(entry, box)
            crc = zlib.crc32(_bytes(saved), crc)
            if not _same(exported, self._exported_values(entry, saved).to(job.type_of(entry.tensor))):
                raise ExportMismatch(f"{file}: {entry.tensor} differs from {entry} in rows {box.start[0]} and on")
        compare(entry, crc)
        return entry.box.numel

    def _read_saved(self, entry: BoxEntry, box: Box) -> Tensor:
        """Returns a box as saved in the checkpoint, in a view of the scratch buffer."""
        saved = self._scratch[: box.numel * entry.dtype.itemsize].view(entry.dtype).view(box.shape)
        read_into(_opened(entry.file).fileno(), entry, box, _bytes(saved))
        return saved

    def _exported_values(self, entry: BoxEntry, saved: Tensor) -> Tensor:
        """Returns the values to export: for a trained tensor, the model's weights or the master weights."""
        return saved.to(self.job.intermediate) if entry.kind == MASTER else saved

    def _file(self, tensor: str) -> str:
        return next(file.name for file in self.job.files if tensor in file.offsets)


@lru_cache(maxsize=256)
def _opened(file: Path) -> io.FileIO:
    """Opens a file, or takes the open file from a cache; the least recently used file is closed when dropped."""
    return open(file, "rb", buffering=0)


def _bytes(tensor: Tensor) -> memoryview:
    data: memoryview = tensor.view(-1).view(torch.uint8).numpy().data
    return data


def _same(a: Tensor, b: Tensor) -> bool:
    """Returns True if tensors are equal bit by bit: a NaN equals itself, and 0 differs from -0."""
    bits = torch.int32 if a.dtype.itemsize == 4 else torch.int16
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.contiguous().view(bits), b.view(bits))


def _write(file: int, data: memoryview, at: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(file, data[done:], at + done)
