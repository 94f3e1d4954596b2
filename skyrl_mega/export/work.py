"""The work of an export's worker: writing and comparing batches of rows."""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Iterator
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from skyrl_mega.common.errors import UserError
from skyrl_mega.common.safe_read import writing
from skyrl_mega.export.job import ExportJob, Slab, overlapping_entries
from skyrl_mega.export.requantise import requantise
from skyrl_mega.hf_checkpoint.box_files import MASTER, BoxEntry, bytes_of, compare, read_into
from skyrl_mega.hf_checkpoint.copied import is_copy, write_copy
from skyrl_mega.hf_checkpoint.tensor_reader import TensorReader
from skyrl_mega.kernels.block_fp8 import BLOCK
from skyrl_mega.models.quantization import SCALE_SUFFIX
from skyrl_mega.parallel.box import Box

ADVICE = "export again, to another disk if this happens twice"
"""Advice in messages about a mismatch."""


class ExportMismatch(RuntimeError):
    """Error for exported data that differs from the checkpoint or from the model directory."""


class ReadRows(NamedTuple):
    """Rows read from a checkpoint entry, contiguous in the entry's file, with the checksum."""

    entry: int
    """Index in `ExportJob.entries`."""
    row: int
    """First row, in the whole tensor."""
    nbytes: int
    """Bytes read."""
    crc: int
    """CRC-32 of the bytes."""


class ExportWorker:
    """A process's part of an export. Each method works on an item of the plan, given by index.

    Memory: two buffers of `job.buffer_bytes`, and a few more with FP8.

    Args:
        job: The plan.
        folder: Folder of the files being written.
    """

    def __init__(self, job: ExportJob, folder: Path) -> None:
        self.job, self.folder = job, folder
        self._out = torch.empty(job.buffer_bytes, dtype=torch.uint8)
        self._scratch = torch.empty(job.buffer_bytes, dtype=torch.uint8)
        self._source = TensorReader()
        self._outputs = job.outputs
        self._places = {tensor: (file.name, at) for file in job.files for tensor, at in file.offsets.items()}

    def write(self, index: int) -> tuple[int, list[ReadRows]]:
        """Writes batch `index` of `job.batches` into its file, which must exist; returns the bytes written, and
        checksums of the data read. The caller compares the checksums.

        Raises:
            Damaged: A file of the checkpoint is too short.
            OSError: A file cannot be read or written.
        """
        batch = self.job.batches[index]
        pieces: list[ReadRows] = []
        at = scale_bytes = 0
        for slab in batch.slabs:
            shape, fp8 = (slab.rows, *self.job.shapes[slab.tensor][1:]), slab.tensor in self.job.fp8.matrices
            dtype = self.job.type_of(slab.tensor)
            size = prod(shape) * dtype.itemsize
            rows = self._out[at : at + size].view(dtype).view(shape)
            if fp8:
                numbers, scales, read = self._blocks(slab)
                rows.copy_(numbers)
                self._put(slab.tensor + SCALE_SUFFIX, slab.first // BLOCK, bytes_of(scales))
                scale_bytes += scales.nbytes
            else:
                read = list(self._read_rows(slab, rows))
                if form := self.job.forms.get(slab.tensor):
                    rows.view(form.shape(shape)).copy_(form.to_disk(rows))
            pieces += read
            at += size
        self._put(batch.slabs[0].tensor, batch.slabs[0].first, self._out.numpy().data[:at])
        return at + scale_bytes, pieces

    def _read_rows(self, slab: Slab, rows: Tensor) -> Iterator[ReadRows]:
        """Fills a slab's rows with the values to export; yields checksums of the data read."""
        job = self.job
        for number, box in overlapping_entries(job, slab):
            entry = job.entries[number]
            into = rows[Box((box.start[0] - slab.first, *box.start[1:]), box.shape).slices()]
            # Direct read: nothing to convert or scatter.
            rounded = entry.kind == MASTER and rows.dtype != job.intermediate
            if entry.dtype == rows.dtype and not rounded and into.is_contiguous():
                read_into(_opened(entry.file).fileno(), entry, box, bytes_of(into))
                saved = into
            else:
                saved = self._read_saved(entry, box)
                into.copy_(self._exported_values(entry, saved))
            data = bytes_of(saved)
            yield ReadRows(number, box.start[0], len(data), zlib.crc32(data))

    def _blocks(self, slab: Slab) -> tuple[Tensor, Tensor, list[ReadRows]]:
        """Returns a slab's numbers and scales in FP8, and checksums of the data read."""
        fp8, shape = self.job.fp8, (slab.rows, self.job.shapes[slab.tensor][1])
        values = torch.empty(shape, dtype=self.job.intermediate)
        read = list(self._read_rows(slab, values))
        stored = self._source.fp8(slab.tensor, fp8.matrices[slab.tensor], slab.first, slab.rows)
        return *requantise(values, *stored, self.job.model, fp8.powers_of_two), read

    def _put(self, tensor: str, row: int, data: memoryview) -> None:
        """Writes data to the place of a tensor's row."""
        name, offset = self._places[tensor]
        shape, dtype = self._outputs[tensor]
        with writing(self.folder / name), open(self.folder / name, "r+b", buffering=0) as opened:
            _write(opened.fileno(), data, offset + row * prod(shape[1:]) * dtype.itemsize)

    def copy(self, index: int) -> int:
        """Writes file `index` of `job.copied` with the tensors from the model directory; returns the tensors' bytes.
        Raises OSError if a file cannot be read or written."""
        name, tensors = list(self.job.copied.items())[index]
        write_copy(tensors, self.folder / name)
        return sum(entry.nbytes for entry in tensors.values())

    def compare_blocks(self, index: int) -> int:
        """Compares the FP8 matrices of batch `index` with the files as read by safetensors, bit by bit; returns 0.

        Raises:
            ExportMismatch: The files differ; names the tensor.
            Damaged: A file of the checkpoint is too short.
            OSError: A file cannot be read.
        """
        for slab in self.job.batches[index].slabs:
            if slab.tensor not in self.job.fp8.matrices:
                continue
            numbers, scales, _ = self._blocks(slab)
            for tensor, row, expected in (
                (slab.tensor, slab.first, numbers),
                (slab.tensor + SCALE_SUFFIX, slab.first // BLOCK, scales),
            ):
                if not _same(self._exported_rows(tensor, Box((row, 0), tuple(expected.shape))), expected):
                    file = self.folder / self._places[tensor][0]
                    raise ExportMismatch(f"{file}: {tensor} differs from the checkpoint from row {row} on; {ADVICE}")
        return 0

    def compare_copy(self, index: int) -> int:
        """Compares file `index` of `job.copied` with the model directory, byte by byte; returns 0.

        Raises:
            ExportMismatch: The files differ, or the written file is missing, cut off, or not in safetensors format;
                names the written file.
            OSError: A file of the model directory cannot be read.
        """
        name, tensors = list(self.job.copied.items())[index]
        try:
            equal = is_copy(tensors, self.folder / name)
        except UserError as error:  # of the written file alone
            raise ExportMismatch(f"{error}; {ADVICE}") from error
        if not equal:
            raise ExportMismatch(f"{self.folder / name} differs from the tensors of the model directory; {ADVICE}")
        return 0

    def flush(self, index: int) -> int:
        """Flushes file `index` of `job.files` to the disk; returns 0. Raises OSError if the disk fails."""
        path = self.folder / self.job.files[index].name
        with writing(path), open(path, "rb") as opened:
            os.fsync(opened.fileno())
        return 0

    def compare(self, index: int) -> int:
        """Compares entry `index` of `job.entries` with the files as read by safetensors, bit by bit; returns the number
        of elements compared.

        The entry's bytes are also compared with the saved CRC-32. For FP8 matrices that is the only comparison here;
        `compare_blocks` compares the values.

        Raises:
            ExportMismatch: The files differ; names the tensor and the entry.
            Damaged: The entry's file is too short or differs from the saved state.
            OSError: A file cannot be read.
        """
        job, entry = self.job, self.job.entries[index]
        file, crc = self.folder / self._places[entry.tensor][0], 0
        step = max(1, len(self._scratch) // (prod(entry.box.shape[1:]) * entry.dtype.itemsize))
        for row in range(0, entry.box.shape[0], step):
            rows = min(step, entry.box.shape[0] - row)
            box = Box((entry.box.start[0] + row, *entry.box.start[1:]), (rows, *entry.box.shape[1:]))
            saved = self._read_saved(entry, box)
            crc = zlib.crc32(bytes_of(saved), crc)
            if entry.tensor in job.fp8.matrices:
                continue  # `compare_blocks` compares the values
            exported = self._exported_rows(entry.tensor, box)
            if not _same(exported, self._exported_values(entry, saved).to(job.type_of(entry.tensor))):
                raise ExportMismatch(
                    f"{file}: {entry.tensor} differs from {entry} from row {box.start[0]} on; {ADVICE}"
                )
        compare(entry, crc)
        return entry.box.numel

    def _read_saved(self, entry: BoxEntry, box: Box) -> Tensor:
        """Returns a box as saved in the checkpoint, in a view of the scratch buffer."""
        saved = self._scratch[: box.numel * entry.dtype.itemsize].view(entry.dtype).view(box.shape)
        read_into(_opened(entry.file).fileno(), entry, box, bytes_of(saved))
        return saved

    def _exported_values(self, entry: BoxEntry, saved: Tensor) -> Tensor:
        """Returns the values to export: for a trained tensor, the model's weights or the master weights."""
        return saved.to(self.job.intermediate) if entry.kind == MASTER else saved

    def _exported_rows(self, tensor: str, box: Box) -> Tensor:
        """Returns a box of a written tensor, read by safetensors."""
        form, (rows, *inner) = self.job.forms.get(tensor), box.slices()
        # Reopened for every box, else more and more of the file is mapped.
        with safe_open(str(self.folder / self._places[tensor][0]), framework="pt") as opened:
            if form is None:
                exported: Tensor = opened.get_slice(tensor)[box.slices()]
                return exported
            whole: Tensor = opened.get_slice(tensor)[rows]
        return form.from_disk(whole, (len(whole), *self.job.shapes[tensor][1:]))[(slice(None), *inner)].contiguous()


@lru_cache(maxsize=256)
def _opened(file: Path) -> io.FileIO:
    """Opens a file, or takes the open file from a cache; the least recently used file is closed when dropped."""
    return open(file, "rb", buffering=0)


def _same(a: Tensor, b: Tensor) -> bool:
    """Returns True if tensors are equal bit by bit: a NaN equals itself, and 0 differs from -0."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.dtype.itemsize]
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.contiguous().view(bits), b.view(bits))


def _write(file: int, data: memoryview, at: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(file, data[done:], at + done)
