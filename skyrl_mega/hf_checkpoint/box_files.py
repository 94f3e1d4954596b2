"""A checkpoint's files: boxes of Hugging Face tensors, written by any number of ranks and readable in any layout.

    checkpoint.json          description, written last: a checkpoint without it is incomplete
    rank_00003.safetensors   boxes written by rank 3

An entry of a safetensors file is a box of a tensor, and its name describes the box: `model.norm.weight[0:64].exp_avg`.
The suffix is the kind: `master` of a trained tensor in float32, `exp_avg` and `exp_avg_sq` of a trained tensor in the
type of its moments, `weight` of a frozen tensor in the model's type. The weights of a trained tensor are its master
weights in the model's type. The file's metadata contains a CRC-32 of every entry, in order, and `checkpoint.json` a
CRC-32 of the file's header: together they verify every byte.

Nothing here needs a process group. Tensors in GPU memory are copied through pinned buffers of `CHUNK_BYTES`, one per
thread; no other host memory is needed except for the index.
"""

from __future__ import annotations

import os
import re
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, product
from math import prod
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from skyrl_mega.common.errors import UserError
from skyrl_mega.common.groups import groups
from skyrl_mega.common.safe_read import parse_json, writing
from skyrl_mega.common.threads import in_threads
from skyrl_mega.hf_checkpoint.box_header import Damaged, Header, SavedFile, read_table
from skyrl_mega.hf_checkpoint.index import header_bytes
from skyrl_mega.parallel.box import Box

MASTER, EXP_AVG, EXP_AVG_SQ, WEIGHT = "master", "exp_avg", "exp_avg_sq", "weight"
CHUNK_BYTES = 16 << 20
"""Bytes that a thread copies, checks and writes or reads at a time (at least one row)."""
THREADS = 4
"""Threads of a rank. A file system serves several writers better than one, and a checksum keeps a core busy."""
_TASK_BYTES = 256 << 20
"""Bytes that a thread reads before taking the next task."""

_CODES = {torch.float32: "F32", torch.bfloat16: "BF16"}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
_ENTRY = re.compile(r"(?P<tensor>.+)\[(?P<box>[\d:,]*)\]\.(?P<kind>\w+)")


@dataclass(frozen=True)
class LocalBox:
    """A box of a tensor in this process's memory, to be written or filled."""

    tensor: str
    """Hugging Face name."""
    box: Box
    """Position in the whole tensor."""
    kind: str
    """`MASTER`, `EXP_AVG`, `EXP_AVG_SQ` or `WEIGHT`."""
    values: Tensor = field(compare=False)
    """A view of the box's shape, on any device."""

    @property
    def name(self) -> str:
        """Name of the box in a file, from `entry_name`."""
        return entry_name(self.tensor, self.box, self.kind)


@dataclass(frozen=True)
class BoxEntry:
    """A box of a tensor in a file."""

    file: Path
    tensor: str
    """Hugging Face name."""
    box: Box
    """Position in the whole tensor."""
    kind: str
    """`MASTER`, `EXP_AVG`, `EXP_AVG_SQ` or `WEIGHT`."""
    dtype: torch.dtype
    offset: int
    """First byte in the file; elements are in C order."""
    crc: int
    """CRC-32 of the bytes."""

    @property
    def nbytes(self) -> int:
        """Bytes of the elements: number of elements · bytes of `dtype`."""
        return self.box.numel * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.file}: {entry_name(self.tensor, self.box, self.kind)}"


Wanted = tuple[BoxEntry, Box, Tensor | None]
"""An entry, the box to read from it, and the local tensor of the box's shape; None only compares the checksum."""


def entry_name(tensor: str, box: Box, kind: str) -> str:
    """Returns the name of a box in a file: `<tensor>[<start>:<end>,…].<kind>`.

    Args:
        tensor: Name of the tensor.
        box: The box.
        kind: Kind of the values: `WEIGHT`, `MASTER`, `EXP_AVG` or `EXP_AVG_SQ`.
    """
    at = ",".join(f"{a}:{a + n}" for a, n in zip(box.start, box.shape, strict=True))
    return f"{tensor}[{at}].{kind}"


def file_name(rank: int) -> str:
    """Returns the name of a rank's file, such as `rank_00003.safetensors`."""
    return f"rank_{rank:05d}.safetensors"


# ---- writing -------------------------------------------------------------------------------------------------------


def write_boxes(file: Path, parts: Sequence[LocalBox]) -> SavedFile:
    """Writes the boxes into a new safetensors file, flushes the file to the disk, and returns its size and checksum.

    Several threads write. The header is written last, so an interrupted file is no safetensors file; it stays after an
    error. Values are float32 or bfloat16, on any device.

    Raises:
        OSError: The file exists already, or the file system failed.
    """
    ordered = sorted(parts, key=lambda part: -part.values.dtype.itemsize)  # aligns every entry
    ends = list(accumulate(part.values.numel() * part.values.dtype.itemsize for part in ordered))
    begins = [0, *ends[:-1]] if ends else []
    header = _header(ordered, begins, ends, [0] * len(ordered))
    buffers = _Buffers((part.box for part in ordered), (part.values for part in ordered))
    with opened(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as descriptor:

        def write(at: int) -> int:
            part, place, crc = ordered[at], len(header) + begins[at], 0
            with buffers.borrow() as buffer:
                for strip in strips(part.box, part.values.dtype.itemsize):
                    values = part.values[strip.inside(part.box)]
                    staged = _start_of(buffer, values.dtype, values.shape)
                    staged.copy_(values)
                    data = bytes_of(staged)
                    crc = zlib.crc32(data, crc)
                    with writing(file):
                        _pwrite(descriptor, data, place)
                    place += len(data)
            return crc

        crcs = in_threads(write, range(len(ordered)), THREADS, "boxes")
        header = _header(ordered, begins, ends, crcs)
        with writing(file):
            _pwrite(descriptor, memoryview(header), 0)
            os.fsync(descriptor)
    return SavedFile(len(header) + (ends[-1] if ends else 0), zlib.crc32(header))


def _header(parts: Sequence[LocalBox], begins: Sequence[int], ends: Sequence[int], crcs: Sequence[int]) -> bytes:
    """Returns a file's header, of a length independent of the checksums."""
    table: dict[str, Any] = {"__metadata__": {"crc32": "".join(f"{crc:08x}" for crc in crcs)}}
    for part, begin, end in zip(parts, begins, ends, strict=True):
        code, shape = _CODES[part.values.dtype], list(part.values.shape)
        table[part.name] = {"dtype": code, "shape": shape, "data_offsets": [begin, end]}
    return header_bytes(table)


# ---- reading -------------------------------------------------------------------------------------------------------


def read_entries(folder: Path, header: Header, tensors: Collection[str]) -> list[BoxEntry]:
    """Returns the entries of these tensors in all files of a checkpoint, in the order of the files. Reads only headers.
    A tensor without an entry is not an error.

    Args:
        folder: The checkpoint's folder.
        header: The content of its checkpoint.json.
        tensors: Hugging Face names.

    Raises:
        Damaged: A file is missing, or its header cannot be read or differs from the saved header; names the file.
    """
    return [entry for name in header.files for entry in _entries(folder / name, header, tensors)]


def _entries(file: Path, header: Header, tensors: Collection[str]) -> Iterator[BoxEntry]:
    data = read_table(file, header)
    try:
        table = parse_json(data[8:])
        crcs = table.pop("__metadata__")["crc32"]
        for at, (name, value) in enumerate(table.items()):
            if name[: name.rindex("[")] not in tensors:
                continue
            match = _ENTRY.fullmatch(name)
            if match is None:
                raise ValueError(f"{name} names no box")
            pairs = [pair.split(":") for pair in match["box"].split(",")]
            box = Box(tuple(int(a) for a, _ in pairs), tuple(int(b) - int(a) for a, b in pairs))
            dtype, (begin, end) = _DTYPES[value["dtype"]], value["data_offsets"]
            shape = header.tensors[match["tensor"]]
            inside = all(0 <= a <= a + n <= m for a, n, m in zip(box.start, box.shape, shape, strict=True))
            if list(box.shape) != value["shape"] or not inside or end - begin != box.numel * dtype.itemsize:
                raise ValueError(f"{name} has shape {value['shape']} and {end - begin} bytes")
            crc = int(crcs[8 * at : 8 * at + 8], 16)
            yield BoxEntry(file, match["tensor"], box, match["kind"], dtype, offset=len(data) + begin, crc=crc)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{file}: its header cannot be read ({error}); take another checkpoint") from error


def read_boxes(entries: Sequence[BoxEntry], parts: Sequence[LocalBox]) -> bool:
    """Fills the values of `parts` from the entries of the same tensor and kind; reads only the needed elements.

    Values are converted to the part's type. An entry read as a whole by one part is compared with its checksum.

    Args:
        entries: Entries of a checkpoint (`read_entries`).
        parts: Boxes in memory; `values` are overwritten.

    Returns:
        True if all data read was compared with checksums; False if any entry was read in part (`check_entries` compares
        entries as a whole).

    Raises:
        UserError: The entries contain too few or too many elements of a part; names the tensor. Nothing is read then.
        Damaged: An entry differs from its saved state; names tensor and file. Parts may then be filled already.
        OSError: A file cannot be opened or read.
    """
    by_tensor: dict[tuple[str, str], list[BoxEntry]] = defaultdict(list)
    for entry in entries:
        by_tensor[entry.tensor, entry.kind].append(entry)
    by_file: dict[Path, list[Wanted]] = defaultdict(list)
    for part in parts:
        covered = 0
        for entry in by_tensor[part.tensor, part.kind]:
            if common := part.box.intersect(entry.box):
                by_file[entry.file].append((entry, common, part.values[common.inside(part.box)]))
                covered += common.numel
        if covered != part.box.numel:
            raise UserError(
                f"the checkpoint has {covered} of its {part.box.numel} elements; the checkpoint is damaged, or was "
                "saved while the tensor was frozen",
                key=part.name,
                fix="take another checkpoint, or give policy.moe.freeze_router as in the saved run",
            )
    tasks: list[list[Wanted]] = []
    for file in sorted(by_file):
        in_order = sorted(by_file[file], key=lambda wanted: wanted[0].offset)
        tasks += groups(in_order, lambda wanted: wanted[1].numel * wanted[0].dtype.itemsize, _TASK_BYTES)
    _read_all(tasks, [part.values for part in parts])
    return all(box == entry.box for task in tasks for entry, box, _ in task)


def check_entries(entries: Sequence[BoxEntry]) -> None:
    """Reads entries as a whole, and compares each with its saved checksum.

    Raises:
        Damaged: An entry differs from its saved state; names tensor and file.
        OSError: A file cannot be opened or read.
    """
    _read_all([[(entry, entry.box, None)] for entry in entries], [])


def _read_all(tasks: Sequence[Sequence[Wanted]], tensors: Sequence[Tensor]) -> None:
    """Reads boxes into `tensors`, on several threads; the boxes of a task are in one file."""
    buffers = _Buffers((box for task in tasks for _, box, _ in task), tensors)

    def read(task: Sequence[Wanted]) -> None:
        with opened(task[0][0].file) as descriptor, buffers.borrow() as buffer:
            for entry, box, into in task:
                _read(descriptor, entry, box, into, buffer)

    in_threads(read, tasks, THREADS, "boxes")


def _read(descriptor: int, entry: BoxEntry, box: Box, into: Tensor | None, buffer: Tensor) -> None:
    crc = 0
    for strip in strips(box, entry.dtype.itemsize):
        staged = _start_of(buffer, entry.dtype, strip.shape)
        read_into(descriptor, entry, strip, bytes_of(staged))
        if box == entry.box:
            crc = zlib.crc32(bytes_of(staged), crc)
        if into is not None:
            into[strip.inside(box)].copy_(staged)
    if box == entry.box:
        compare(entry, crc)


def compare(entry: BoxEntry, crc: int) -> None:
    """Compares the CRC-32 of an entry's bytes as read, `crc`, with the saved CRC-32.

    Raises:
        Damaged: The checksums differ; names tensor and file.
    """
    if crc != entry.crc:
        raise Damaged(
            f"{entry}: its CRC-32 is {crc:08x}, it was saved with {entry.crc:08x}; the file is damaged, take another "
            "checkpoint"
        )


def read_into(descriptor: int, entry: BoxEntry, box: Box, data: memoryview) -> None:
    """Reads a box inside an entry into `data`, in C order. Compares no checksum.

    Args:
        descriptor: Descriptor of the entry's file, open for reading.
        entry: Entry to read from.
        box: Box in the entry's tensor, with global coordinates as in the entry.
        data: Destination, of the box's size in bytes.

    Raises:
        Damaged: The file ends before the box does; names file and tensor. `data` is then partly filled.
        OSError: The file cannot be read.
    """
    shape, start = entry.box.shape, [a - b for a, b in zip(box.start, entry.box.start, strict=True)]
    # Trailing dimensions read in full, and the dimension before them, form a single run of bytes.
    outer = len(shape) - 1
    while outer and box.shape[outer] == shape[outer]:
        outer -= 1
    size = prod(box.shape[outer:]) * entry.dtype.itemsize
    for n, lead in enumerate(product(*(range(box.shape[d]) for d in range(outer)))):
        element = 0
        for d, width in enumerate(shape):
            element = element * width + start[d] + (lead[d] if d < outer else 0)
        at, run, done = entry.offset + element * entry.dtype.itemsize, data[n * size : (n + 1) * size], 0
        while done < size:
            got = os.preadv(descriptor, [run[done:]], at + done)
            if not got:
                raise Damaged(f"{entry}: ends before its data: the checkpoint has changed since; read it again")
            done += got


# ---- both ----------------------------------------------------------------------------------------------------------


class _Buffers:
    """Blocks of host memory, one per thread, each used for one tensor after another.

    A block has the size of a chunk, or of the widest row of the boxes (in 4-byte elements) if larger.

    Args:
        boxes: The boxes to read or write.
        tensors: The local tensors. Copies to and from a GPU use page-locked memory.
    """

    def __init__(self, boxes: Iterable[Box], tensors: Iterable[Tensor]) -> None:
        size = max([CHUNK_BYTES, *(4 * prod(box.shape[1:]) for box in boxes)])
        pinned = any(tensor.is_cuda for tensor in tensors)
        self._free: SimpleQueue[Tensor] = SimpleQueue()
        for _ in range(THREADS):
            self._free.put(torch.empty(size, dtype=torch.uint8, pin_memory=pinned))

    @contextmanager
    def borrow(self) -> Iterator[Tensor]:
        """Yields a free block (uint8), taken until the end of the context. Waits, without limit, while no block is
        free."""
        buffer = self._free.get()
        try:
            yield buffer
        finally:
            self._free.put(buffer)


def _start_of(buffer: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Returns the beginning of a block as a tensor of this type and shape, sharing the memory."""
    return buffer[: prod(shape) * dtype.itemsize].view(dtype).view(*shape)


def strips(box: Box, itemsize: int) -> Iterator[Box]:
    """Yields a box, in order, as boxes of whole rows of at most `CHUNK_BYTES` (at least a row). `itemsize` is the
    number of bytes of an element."""
    step = max(1, CHUNK_BYTES // (prod(box.shape[1:]) * itemsize))
    for row in range(0, box.shape[0], step):
        yield Box((box.start[0] + row, *box.start[1:]), (min(step, box.shape[0] - row), *box.shape[1:]))


@contextmanager
def opened(file: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    """Yields a descriptor of the file, closed at the end of the context. Raises OSError if the file cannot be
    opened."""
    descriptor = os.open(file, flags, 0o666)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def bytes_of(tensor: Tensor) -> memoryview:
    """Returns the bytes of a contiguous tensor in host memory, as a writable view. Raises RuntimeError for a tensor
    that is not contiguous, and TypeError for a tensor on a GPU."""
    data: memoryview = tensor.view(-1).view(torch.uint8).numpy().data
    return data


def _pwrite(descriptor: int, data: memoryview, at: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], at + done)
