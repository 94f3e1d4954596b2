"""What an export will do, decided before anything is written: which rows of which record become which bytes of which
file."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, product, zip_longest
from math import prod
from typing import Any, Literal

import torch

from skyrl_mega.config.errors import UserError
from skyrl_mega.export.records import Record, StoredTensor
from skyrl_mega.layout.box import Box, Piece, Shard
from skyrl_mega.models.registry import architecture
from skyrl_mega.weights.files import file_names, split

Origin = Literal["weights", "master"]
"""What is exported: the weights that the model computes with, or the optimizer's float32 copies."""

MASTER = "optimizer.state.param."
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
    records: tuple[Record, ...]
    """Those that are read, in the order of the checkpoint's files."""
    pieces: dict[str, tuple[tuple[int, Piece], ...]]
    """Tensor → (index of a record, where it lies in both), by first row. `param` is the record's key."""
    files: tuple[OutputFile, ...]
    batches: tuple[Batch, ...]
    """All of it, in the order in which it is written."""
    buffer_bytes: int
    """What the largest batch needs, before or after its conversion; a worker has two such buffers."""
    without_master: tuple[str, ...] = ()
    """Keys that the optimizer does not train; their weights are exported."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in the files."""
        return sum(prod(shape) for shape in self.shapes.values()) * self.dtype.itemsize


def plan_job(
    hf: Mapping[str, Any],
    stored: Mapping[str, StoredTensor],
    *,
    dtype: torch.dtype | None,
    origin: Origin,
    file_bytes: int,
) -> Job:
    """Plans an export.

    Args:
        hf: the model's config.json.
        stored: the checkpoint's tensors.
        dtype: of the files; None is that of what is exported.
        origin: what is exported.
        file_bytes: size of one file at most (one tensor at least).

    Raises:
        UserError: the checkpoint is of another model, not whole, or has no master weights.
    """
    shapes = architecture(hf).tensors(hf)
    shard = architecture(hf).stored_shard(hf, stored)
    frozen: tuple[str, ...] = ()
    chosen = {key: stored[key] for key in shard.params}
    if origin == "master":
        frozen = tuple(key for key in shard.params if MASTER + key not in stored)
        if len(frozen) == len(shard.params):
            raise UserError("--from master: the checkpoint has no master weights; allowed is --from weights")
        chosen |= {key: stored[MASTER + key] for key in shard.params if key not in frozen}
    _check_shapes(shard, chosen)
    records, pieces = _cut(shard, chosen)
    _check_covered(shapes, pieces)
    found = {tensor.dtype for key, tensor in chosen.items() if key not in frozen}
    if dtype is None:
        if len(found) > 1:
            raise UserError("--dtype as-trained: the checkpoint has tensors of several types; give bfloat16 or float32")
        dtype = found.pop()
    if dtype not in _CODES or not {record.dtype for record in records} <= set(_CODES):
        raise UserError(f"--dtype: {dtype} from {found}; allowed are bfloat16 and float32, from either of them")
    files = _files(shapes, dtype, file_bytes)
    widest = max(dtype.itemsize, *(record.dtype.itemsize for record in records))
    # All files go forward together: a file system lets one writer at a time into a file.
    by_file = [[Batch(i, slabs) for slabs in _batches(file, shapes, widest)] for i, file in enumerate(files)]
    batches = tuple(batch for row in zip_longest(*by_file) for batch in row if batch)
    largest = max(sum(slab.rows * prod(shapes[slab.tensor][1:]) for slab in batch.slabs) for batch in batches) * widest
    return Job(shapes, dtype, records, pieces, files, batches, largest, frozen)


def within(tensor: tuple[tuple[int, Piece], ...], first: int, rows: int) -> Iterator[tuple[int, Piece, Box]]:
    """The pieces of a tensor that have some of its rows: record, piece, and the box that is in those rows."""
    for index, piece in tensor:
        low = max(piece.box.start[0], first)
        high = min(piece.box.start[0] + piece.box.shape[0], first + rows)
        if low < high:
            yield index, piece, Box((low, *piece.box.start[1:]), (high - low, *piece.box.shape[1:]))


def first_element(record: Record, piece: Piece, row: int) -> int:
    """Where row `row` of the tensor, as far as the piece has it, begins in the record, in elements.

    A record is cut along one dimension, so it has the piece's whole width and the piece's rows follow each other.
    """
    k = len(piece.offset) - len(piece.box.shape)
    at = list(piece.offset)
    at[k] += row - piece.box.start[0]
    return sum(i * prod(record.box.shape[n + 1 :]) for n, i in enumerate(at))


def _check_shapes(shard: Shard, chosen: Mapping[str, StoredTensor]) -> None:
    """Every key has the shape that config.json makes it; the vocabulary may have rows of padding."""
    for key, shape in shard.params.items():
        there = chosen[key].shape
        padded = key in ("embedding.word_embeddings.weight", "output_layer.weight")
        if there != shape and not (padded and there[1:] == shape[1:] and there[0] > shape[0]):
            raise UserError(
                f"{key}: the checkpoint has shape {list(there)}, config.json makes it {list(shape)}; the two are of "
                "different models, give --model"
            )


def _cut(
    shard: Shard, chosen: Mapping[str, StoredTensor]
) -> tuple[tuple[Record, ...], dict[str, tuple[tuple[int, Piece], ...]]]:
    """The records that hold something, and per tensor its pieces in them."""
    # By key and place in its stack, or each expert of a layer would be compared with all of them.
    at: dict[tuple[str, tuple[int, ...]], list[Piece]] = defaultdict(list)
    for piece in shard.pieces:
        at[piece.param, piece.offset[: len(piece.offset) - len(piece.box.shape)]].append(piece)
    depth = {key: len(stack) for key, stack in at}
    used: list[tuple[Record, list[Piece]]] = []
    for key, k in depth.items():
        for record in chosen[key].records:
            ranges = (range(a, a + n) for a, n in zip(record.box.start[:k], record.box.shape[:k], strict=True))
            near = (piece for stack in product(*ranges) for piece in at[key, stack])
            held = [part for piece in near if (part := _part(piece, record.box)) is not None]
            if held:
                used.append((record, held))
    used.sort(key=lambda pair: (pair[0].file, pair[0].offset))
    found: dict[str, list[tuple[int, Piece]]] = defaultdict(list)
    for index, (_, held) in enumerate(used):
        for piece in held:
            found[piece.tensor].append((index, piece))
    ordered = {name: tuple(sorted(parts, key=lambda p: p[1].box.start)) for name, parts in found.items()}
    return tuple(record for record, _ in used), ordered


def _part(piece: Piece, record: Box) -> Piece | None:
    """What a record holds of a piece; the offset is the record's own."""
    k = len(piece.offset) - len(piece.box.shape)
    common = Box(piece.offset, (1,) * k + piece.box.shape).intersect(record)
    if common is None:
        return None
    start = tuple(a + b - c for a, b, c in zip(piece.box.start, common.start[k:], piece.offset[k:], strict=True))
    offset = tuple(a - b for a, b in zip(common.start, record.start, strict=True))
    if common.shape[k + 1 :] != record.shape[k + 1 :]:
        raise UserError(f"{piece.param}: a record has columns of several tensors; no layout of this project saves so")
    return Piece(piece.tensor, Box(start, common.shape[k:]), piece.param, offset)


def _check_covered(shapes: Mapping[str, tuple[int, ...]], pieces: Mapping[str, tuple[tuple[int, Piece], ...]]) -> None:
    """Every element of every tensor lies in one record. Records of one key never overlap, so counting is enough."""
    for tensor, shape in shapes.items():
        there = sum(piece.box.numel for _, piece in pieces.get(tensor, ()))
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
