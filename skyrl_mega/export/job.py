"""What an export will do, decided before anything is written: which rows of which entry of the checkpoint become which
bytes of which file."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from math import prod
from typing import Any, Literal

import torch

from skyrl_mega.config.errors import UserError
from skyrl_mega.hf_checkpoint.box_files import MASTER, WEIGHT, Entry
from skyrl_mega.hf_checkpoint.box_header import Header
from skyrl_mega.hf_checkpoint.load import file_names, split
from skyrl_mega.models.registry import architecture
from skyrl_mega.parallel.box import Box

Origin = Literal["weights", "master"]
"""What is exported: the weights that the model computes with, or the optimizer's float32 copies."""

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_CODES = {torch.bfloat16: "BF16", torch.float32: "F32"}
"""safetensors' names."""
SLAB_BYTES = 16 << 20
"""What a worker reads or writes at a time; it has a buffer of this size for each."""

PAGE_BYTES = 4096
"""Headers are filled up with spaces to whole pages, and tensors of whole pages come first: most writes are of whole
pages then, which cost the kernel half as much."""


@dataclass(frozen=True)
class Slab:
    """Rows of one tensor. Their bytes in the file are contiguous."""

    tensor: str
    first: int
    rows: int


@dataclass(frozen=True)
class Batch:
    """Slabs that stand one after the other in one file: one write."""

    file: int
    """Index of the file."""
    slabs: tuple[Slab, ...]


@dataclass(frozen=True)
class OutputFile:
    """A safetensors file: its header, and where each tensor's bytes begin."""

    name: str
    header: bytes
    """With the eight bytes of its length."""
    offsets: dict[str, int]
    """Tensor → its first byte in the file."""
    nbytes: int


@dataclass(frozen=True)
class Job:
    """Everything that a worker needs to know."""

    shapes: dict[str, tuple[int, ...]]
    """The tensors of the Hugging Face directory."""
    dtype: torch.dtype
    through: torch.dtype
    """What a master weight is rounded to before it gets the files' type: the model's, or float32."""
    entries: tuple[Entry, ...]
    """Those that are read, in the order of the checkpoint's files."""
    of: dict[str, tuple[int, ...]]
    """Tensor → its entries, by first row."""
    files: tuple[OutputFile, ...]
    batches: tuple[Batch, ...]
    """All of it, in the order in which it is written."""
    buffer_bytes: int
    """What the largest batch needs, before or after its conversion; a worker has two such buffers."""
    without_master: tuple[str, ...] = ()
    """Tensors that the optimizer does not train; their weights are exported."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in the files."""
        return sum(prod(shape) for shape in self.shapes.values()) * self.dtype.itemsize


def plan_job(
    hf: Mapping[str, Any],
    header: Header,
    stored: Sequence[Entry],
    *,
    dtype: torch.dtype | None,
    origin: Origin,
    file_bytes: int,
) -> Job:
    """Plans an export.

    Args:
        hf: the model's config.json.
        header: the checkpoint's.
        stored: its entries.
        dtype: of the files; None is that of what is exported.
        origin: what is exported.
        file_bytes: size of one file at most (one tensor at least).

    Raises:
        UserError: the checkpoint is of another model, not whole, or has no master weights.
    """
    shapes = architecture(hf).tensors(hf)
    _check_shapes(shapes, header)
    entries = sorted((e for e in stored if e.kind in (MASTER, WEIGHT)), key=lambda e: (e.file, e.offset))
    trained = {entry.tensor for entry in entries if entry.kind == MASTER}
    model = DTYPES[header.dtype]
    if origin == "master" and not trained:
        raise UserError("--from master: the checkpoint has no master weights; allowed is --from weights")
    through = torch.float32 if origin == "master" else model
    dtype = dtype or through
    found: dict[str, list[int]] = defaultdict(list)
    for index, entry in enumerate(entries):
        found[entry.tensor].append(index)
    of = {t: tuple(sorted(same, key=lambda index: entries[index].box.start)) for t, same in found.items()}
    _check_covered(shapes, entries, of)
    files = _files(shapes, dtype, file_bytes)
    widest = max(dtype.itemsize, *(entry.dtype.itemsize for entry in entries))
    # All files go forward together: a file system lets one writer at a time into a file.
    by_file = [[Batch(i, slabs) for slabs in _batches(file, shapes, widest)] for i, file in enumerate(files)]
    batches = tuple(batch for row in zip_longest(*by_file) for batch in row if batch)
    largest = max(sum(slab.rows * prod(shapes[slab.tensor][1:]) for slab in batch.slabs) for batch in batches) * widest
    frozen = tuple(tensor for tensor in shapes if tensor not in trained) if origin == "master" else ()
    return Job(
        shapes, dtype, through, tuple(entries), of, files, batches=batches, buffer_bytes=largest, without_master=frozen
    )


def within(job: Job, slab: Slab) -> Iterator[tuple[int, Box]]:
    """The entries that have some of a slab's rows, by index, and the box of each that is in those rows."""
    for index in job.of[slab.tensor]:
        entry = job.entries[index]
        low = max(entry.box.start[0], slab.first)
        high = min(entry.box.start[0] + entry.box.shape[0], slab.first + slab.rows)
        if low < high:
            yield index, Box((low, *entry.box.start[1:]), (high - low, *entry.box.shape[1:]))


def _check_shapes(shapes: Mapping[str, tuple[int, ...]], header: Header) -> None:
    """The checkpoint is of the model that config.json describes."""
    for name in (*shapes, *header.tensors):
        here, there = shapes.get(name), header.tensors.get(name)
        if here != there:
            raise UserError(
                f"{name}: the checkpoint has {f'shape {list(there)}' if there else 'none'}, config.json makes "
                f"{f'it {list(here)}' if here else 'none'}; the two are of different models, give --model"
            )


def _check_covered(
    shapes: Mapping[str, tuple[int, ...]], entries: Sequence[Entry], of: Mapping[str, Sequence[int]]
) -> None:
    """Every element of every tensor lies in one entry. Entries never overlap, so counting is enough."""
    for tensor, shape in shapes.items():
        there = sum(entries[index].box.numel for index in of.get(tensor, ()))
        if there != prod(shape):
            raise UserError(
                f"{tensor}: the checkpoint has {there} of its {prod(shape)} elements; it is not whole, take another one"
            )


def _files(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, file_bytes: int) -> tuple[OutputFile, ...]:
    dealt = list(split(shapes, dtype.itemsize, file_bytes))
    files = []
    for name, tensors in zip(file_names(len(dealt)), dealt, strict=True):
        # Whole pages first: a tensor of another size would shift all that follow it.
        tensors.sort(key=lambda t: prod(shapes[t]) * dtype.itemsize % PAGE_BYTES != 0)
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        ends = list(accumulate(prod(shapes[t]) * dtype.itemsize for t in tensors))
        begins = [0, *ends[:-1]]
        for tensor, begin, end in zip(tensors, begins, ends, strict=True):
            entries[tensor] = {"dtype": _CODES[dtype], "shape": list(shapes[tensor]), "data_offsets": [begin, end]}
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-(len(text) + 8) % PAGE_BYTES)
        header = len(text).to_bytes(8, "little") + text
        offsets = {tensor: len(header) + begin for tensor, begin in zip(tensors, begins, strict=True)}
        files.append(OutputFile(name, header, offsets, len(header) + ends[-1]))
    return tuple(files)


def _batches(file: OutputFile, shapes: Mapping[str, tuple[int, ...]], itemsize: int) -> Iterator[tuple[Slab, ...]]:
    """The file's tensors as runs of rows, a buffer full at a time (one row at least)."""
    batch: list[Slab] = []
    room = SLAB_BYTES
    for tensor in file.offsets:
        rows, *rest = shapes[tensor]
        width = prod(rest) * itemsize
        first = 0
        while first < rows:
            if batch and width > room:
                yield tuple(batch)
                batch, room = [], SLAB_BYTES
            count = min(rows - first, max(1, room // width))
            batch.append(Slab(tensor, first, count))
            first, room = first + count, room - count * width
    if batch:
        yield tuple(batch)
