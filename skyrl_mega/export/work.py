"""What a worker does with its share: find the elements in the records, write batches of rows, compare them again."""

from __future__ import annotations

import os
import zlib
from collections import defaultdict
from collections.abc import Iterator
from math import prod
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from skyrl_mega.config.errors import UserError
from skyrl_mega.export.job import Job, first_element, within
from skyrl_mega.export.records import Record, locate, read
from skyrl_mega.layout.box import Box, Piece


class Different(RuntimeError):
    """What was written is not what the checkpoint holds."""


class Worker:
    """One process's part. Besides two buffers of `job.buffer_bytes` it keeps nothing.

    Args:
        job: the plan; `locate` needs no located records, everything else does.
        folder: the files that are written.
    """

    def __init__(self, job: Job, folder: Path) -> None:
        self.job, self.folder = job, folder
        self._out = torch.empty(job.buffer_bytes, dtype=torch.uint8)
        self._scratch = torch.empty(job.buffer_bytes, dtype=torch.uint8)
        self._held: dict[int, list[Piece]] = {}

    def locate(self, index: int) -> tuple[int, int]:
        """Where the elements of a record begin, and their CRC-32."""
        return locate(self.job.records[index])

    def write(self, index: int) -> int:
        """Writes a batch; returns its bytes."""
        job, batch = self.job, self.job.batches[index]
        file, at = job.files[batch.file], 0
        for slab in batch.slabs:
            shape = (slab.rows, *job.shapes[slab.tensor][1:])
            size = prod(shape) * job.dtype.itemsize
            rows = self._out[at : at + size].view(job.dtype).view(shape)
            for number, piece, box in within(job.pieces[slab.tensor], slab.first, slab.rows):
                record = job.records[number]
                into = rows[Box((box.start[0] - slab.first, *box.start[1:]), box.shape).slices()]
                if record.dtype == job.dtype and into.is_contiguous():  # most: nothing to convert or to scatter
                    read(record, first_element(record, piece, box.start[0]), box.numel, into.view(-1).view(torch.uint8))
                else:
                    into.copy_(self._source(record, piece, box))
            at += size
        first = batch.slabs[0]
        width = prod(job.shapes[first.tensor][1:]) * job.dtype.itemsize
        with open(self.folder / file.name, "r+b", buffering=0) as opened:
            _write(opened.fileno(), self._out.numpy().data[:at], file.offsets[first.tensor] + first.first * width)
        return at

    def flush(self, index: int) -> int:
        """Brings a file to the disk."""
        with open(self.folder / self.job.files[index].name, "rb") as opened:
            os.fsync(opened.fileno())
        return 0

    def compare(self, index: int) -> int:
        """Compares a record with what safetensors reads from the files, bit by bit; returns the elements compared.

        The record's own bytes are compared with the CRC-32 that was written beside them.

        Raises:
            Different: names the tensor and the record.
        """
        job, record = self.job, self.job.records[index]
        crc = 0
        for first, count in _runs(record.box.numel, len(self._scratch) // record.dtype.itemsize):
            crc = zlib.crc32(read(record, first, count, self._scratch).view(torch.uint8).numpy().data, crc)
        if crc != record.crc:
            raise UserError(
                f"{record}: its CRC-32 is {crc:08x}, it was saved with {record.crc:08x}; the file is damaged"
            )
        compared = 0
        for piece in self._pieces(index):
            where = self.folder / self._file(piece.tensor)
            width = prod(piece.box.shape[1:]) * max(record.dtype.itemsize, job.dtype.itemsize)
            for first, rows in _runs(piece.box.shape[0], len(self._scratch) // width):
                box = Box((piece.box.start[0] + first, *piece.box.start[1:]), (rows, *piece.box.shape[1:]))
                with safe_open(str(where), framework="pt") as opened:  # anew, or it maps more and more of the file
                    found = opened.get_slice(piece.tensor)[box.slices()]
                if not _same(found, self._source(record, piece, box).to(job.dtype)):
                    raise Different(f"{where}: {piece.tensor} differs from {record} in rows {box.start[0]} and on")
                compared += box.numel
        return compared

    def _source(self, record: Record, piece: Piece, box: Box) -> Tensor:
        """The rows `box` of a piece, as the record has them; a view of the scratch buffer."""
        return read(record, first_element(record, piece, box.start[0]), box.numel, self._scratch).view(box.shape)

    def _pieces(self, index: int) -> list[Piece]:
        if not self._held:
            held: dict[int, list[Piece]] = defaultdict(list)
            for pieces in self.job.pieces.values():
                for number, piece in pieces:
                    held[number].append(piece)
            self._held = held
        return self._held[index]

    def _file(self, tensor: str) -> str:
        return next(file.name for file in self.job.files if tensor in file.offsets)


def _runs(total: int, step: int) -> Iterator[tuple[int, int]]:
    """Start and length of the runs that `total` is cut into."""
    return ((at, min(step, total - at)) for at in range(0, total, step))


def _same(a: Tensor, b: Tensor) -> bool:
    """Bit by bit: a NaN equals itself, and 0 is not -0."""
    bits = torch.int32 if a.dtype.itemsize == 4 else torch.int16
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.contiguous().view(bits), b.view(bits))


def _write(file: int, data: memoryview, at: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(file, data[done:], at + done)
