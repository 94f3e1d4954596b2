"""The plan of an export, made before anything is written: from rows of checkpoint entries to bytes of output files.

An export in block FP8 has a second input, the model directory: blocks that training did not change keep the numbers
and the scale of its files.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, zip_longest
from math import prod
from typing import Any, Literal

import torch

from skyrl_mega.common.errors import UserError
from skyrl_mega.common.groups import groups
from skyrl_mega.hf_checkpoint.box_files import MASTER, WEIGHT, BoxEntry
from skyrl_mega.hf_checkpoint.box_header import Header
from skyrl_mega.hf_checkpoint.copied import Copied
from skyrl_mega.hf_checkpoint.index import TensorEntry, header_bytes
from skyrl_mega.hf_checkpoint.load import file_names
from skyrl_mega.hf_checkpoint.tensor_reader import TORCH_DTYPES
from skyrl_mega.models.disk_form import DiskForm, disk_shapes
from skyrl_mega.models.quantization import BLOCK, SCALE_SUFFIX
from skyrl_mega.models.registry import architecture
from skyrl_mega.parallel.box import Box
from skyrl_mega.weights.fp8.format import FP8, Wire

Origin = Literal["weights", "master"]
"""Source of the exported values: the model's weights, or the optimizer's float32 copies."""

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_CODES = {dtype: code for code, dtype in TORCH_DTYPES.items()}
"""Names of types in safetensors."""
SLAB_BYTES = 16 << 20
"""Bytes that a worker reads or writes at a time; a worker has a buffer of this size for each."""

PAGE_BYTES = 4096
"""Page size of files. Headers are padded with spaces to whole pages, and tensors of whole pages come first: most
writes then cover whole pages, at half the cost for the kernel.
"""


@dataclass(frozen=True)
class Slab:
    """Rows of a tensor, contiguous in the output file."""

    tensor: str
    first: int
    """First row."""
    rows: int
    """Number of rows."""


@dataclass(frozen=True)
class SlabBatch:
    """Consecutive slabs of an output file, written in a single call."""

    file: int
    """Index in `ExportJob.files`."""
    slabs: tuple[Slab, ...]


@dataclass(frozen=True)
class OutputFile:
    """A safetensors file: the header, and the place of each tensor."""

    name: str
    header: bytes
    """Includes the eight bytes of the length."""
    offsets: dict[str, int]
    """First byte of each tensor in the file."""
    nbytes: int
    """Size of the file, header included."""


Output = tuple[tuple[int, ...], torch.dtype]
"""Shape and type of a tensor in a file."""


@dataclass(frozen=True)
class Fp8Source:
    """The block FP8 of a model directory, to be used for an export."""

    matrices: Mapping[str, TensorEntry] = field(default_factory=dict)
    """Name → matrix in FP8, with the entry of the scales; {} for an export without FP8."""
    powers_of_two: bool = False
    """True if every scale is a power of two."""


@dataclass(frozen=True)
class ExportJob:
    """The plan of an export: checkpoint entries to read, files and batches to write. Every worker gets the same
    plan."""

    shapes: dict[str, tuple[int, ...]]
    """Shapes of the model's tensors."""
    dtype: torch.dtype
    """Type of the files' tensors, except the tensors in `float32` and `fp8`."""
    model: torch.dtype
    """Type of the model in training."""
    intermediate: torch.dtype
    """Type to which a master weight is rounded before conversion to the files' type: the model's, or float32."""
    entries: tuple[BoxEntry, ...]
    """Entries to read, in the order of the checkpoint's files."""
    entries_of: dict[str, tuple[int, ...]]
    """Indices of each tensor's entries, by first row."""
    files: tuple[OutputFile, ...]
    batches: tuple[SlabBatch, ...]
    """All batches, in the order of writing."""
    buffer_bytes: int
    """Bytes of the largest batch, before or after conversion; a worker has two such buffers."""
    without_master: tuple[str, ...] = ()
    """Tensors that the optimizer does not train; exported from the model's weights."""
    float32: frozenset[str] = frozenset()
    """Tensors in float32 in files of any type (`Decoder.float32_tensors`)."""
    forms: Mapping[str, DiskForm] = field(default_factory=dict)
    """Tensors with another order of axes in the files; the first axis, of rows, is the same."""
    fp8: Fp8Source = Fp8Source()
    copied: Mapping[str, Copied] = field(default_factory=dict)
    """File → tensors that are copied from the model directory."""

    def type_of(self, tensor: str) -> torch.dtype:
        """Returns the dtype of a tensor of the model in the output files, or of a tensor of scales."""
        return self.outputs[tensor][1]

    @property
    def elements(self) -> int:
        """Number of elements of the model's tensors."""
        return sum(prod(shape) for shape in self.shapes.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in the files: the model's, scales, and copied tensors."""
        return sum(prod(shape) * dtype.itemsize for shape, dtype in self.outputs.values()) + self.copied_bytes

    @property
    def copied_bytes(self) -> int:
        """Bytes of the tensors copied from the model directory."""
        return sum(entry.nbytes for tensors in self.copied.values() for entry in tensors.values())

    @cached_property
    def outputs(self) -> dict[str, Output]:
        """Name → shape and dtype of the model's tensors, and of scales, in the output files."""
        return _outputs(disk_shapes(self.shapes, self.forms), Wire(self.dtype, float32=self.float32), self.fp8)


def plan_job(
    hf: Mapping[str, Any],
    header: Header,
    stored: Sequence[BoxEntry],
    *,
    dtype: torch.dtype | None,
    origin: Origin,
    file_bytes: int,
    fp8: Fp8Source | None = None,
    copied: Sequence[Copied] = (),
) -> ExportJob:
    """Returns the plan of an export. Writes nothing.

    Args:
        hf: The model's config.json.
        header: The checkpoint's header.
        stored: The checkpoint's entries.
        dtype: Type of the files; None means the type of the exported values: the model's, or float32 for "master".
        origin: Source of the exported values: the model's "weights", or the optimizer's float32 copies, "master".
        file_bytes: Maximum size of a file (at least one tensor).
        fp8: Block FP8 for the files; None means no FP8. With FP8, other tensors have the model's type, never `dtype`.
        copied: Tensors to copy from the model directory (`copies`); each entry becomes a further file.

    Raises:
        UserError: The checkpoint is of another model, incomplete, or without master weights.
    """
    decoder, shapes = architecture(hf).describe(hf), architecture(hf).tensors(hf)
    float32, forms = decoder.float32_tensors, decoder.disk_forms
    _check_shapes(shapes, header)
    entries = sorted((e for e in stored if e.kind in (MASTER, WEIGHT)), key=lambda e: (e.file, e.offset))
    trained = {entry.tensor for entry in entries if entry.kind == MASTER}
    model, entries_of = DTYPES[header.dtype], _entries_of(entries)
    if origin == "master" and not trained:
        raise UserError("the checkpoint has no master weights; allowed is --from weights", key="--from", value="master")
    intermediate = torch.float32 if origin == "master" else model
    dtype, fp8 = (model, fp8) if fp8 else (dtype or intermediate, Fp8Source())
    _check_covered(shapes, entries, entries_of)
    files = _files(_outputs(disk_shapes(shapes, forms), Wire(dtype, float32=float32), fp8), file_bytes, len(copied))
    widest = max(dtype.itemsize, *(entry.dtype.itemsize for entry in entries))
    # All files advance together: a file system allows a single writer per file at a time.
    by_file = [[SlabBatch(i, slabs) for slabs in _batches(file, shapes, widest, fp8)] for i, file in enumerate(files)]
    batches = tuple(batch for row in zip_longest(*by_file) for batch in row if batch)
    largest = max(sum(slab.rows * prod(shapes[slab.tensor][1:]) for slab in batch.slabs) for batch in batches) * widest
    frozen = tuple(tensor for tensor in shapes if tensor not in trained) if origin == "master" else ()
    return ExportJob(
        shapes,
        dtype,
        model,
        intermediate,
        tuple(entries),
        entries_of,
        files=files,
        batches=batches,
        buffer_bytes=largest,
        without_master=frozen,
        float32=float32,
        forms=forms,
        fp8=fp8,
        copied=dict(zip(file_names(len(files) + len(copied))[len(files) :], copied, strict=True)),
    )


def overlapping_entries(job: ExportJob, slab: Slab) -> Iterator[tuple[int, Box]]:
    """Yields every checkpoint entry with rows of a slab: the index in `job.entries`, and the box of these rows in the
    whole tensor's coordinates."""
    for index in job.entries_of[slab.tensor]:
        entry = job.entries[index]
        low = max(entry.box.start[0], slab.first)
        high = min(entry.box.start[0] + entry.box.shape[0], slab.first + slab.rows)
        if low < high:
            yield index, Box((low, *entry.box.start[1:]), (high - low, *entry.box.shape[1:]))


def _entries_of(entries: Sequence[BoxEntry]) -> dict[str, tuple[int, ...]]:
    """Returns the indices of each tensor's entries, by first row."""
    indices_by_tensor: dict[str, list[int]] = defaultdict(list)
    for index, entry in enumerate(entries):
        indices_by_tensor[entry.tensor].append(index)
    return {
        t: tuple(sorted(indices, key=lambda index: entries[index].box.start))
        for t, indices in indices_by_tensor.items()
    }


def _check_shapes(shapes: Mapping[str, tuple[int, ...]], header: Header) -> None:
    """Checks that the checkpoint is of the model in config.json.

    Raises:
        UserError: Tensors or shapes differ.
    """
    for name in (*shapes, *header.tensors):
        expected, stored = shapes.get(name), header.tensors.get(name)
        if expected != stored:
            raise UserError(
                f"the checkpoint has {(f'shape {list(stored)}' if stored else 'no such tensor')}, "
                f"config.json makes {(f'it {list(expected)}' if expected else 'no such tensor')}; the two "
                "are of different models; give --model with the directory of the trained model",
                key=name,
            )


def _check_covered(
    shapes: Mapping[str, tuple[int, ...]], entries: Sequence[BoxEntry], entries_of: Mapping[str, Sequence[int]]
) -> None:
    """Checks that entries contain every element of every tensor. Entries never overlap, so counting is enough.

    Raises:
        UserError: The checkpoint is incomplete.
    """
    for tensor, shape in shapes.items():
        covered = sum(entries[index].box.numel for index in entries_of.get(tensor, ()))
        if covered != prod(shape):
            raise UserError(
                f"the checkpoint has {covered} of its {prod(shape)} elements; the checkpoint is damaged, take another",
                key=tensor,
            )


def _outputs(shapes: Mapping[str, tuple[int, ...]], types: Wire, fp8: Fp8Source) -> dict[str, Output]:
    """Returns shape and type of every tensor in the files, scales included."""
    outputs: dict[str, Output] = {}
    for tensor, shape in shapes.items():
        matrix = fp8.matrices.get(tensor)
        outputs[tensor] = (shape, FP8 if matrix else types.type_of(tensor))
        if matrix and matrix.scales:
            outputs[tensor + SCALE_SUFFIX] = (matrix.scales.shape, TORCH_DTYPES[matrix.scales.dtype])
    return outputs


def _files(outputs: Mapping[str, Output], file_bytes: int, copied: int) -> tuple[OutputFile, ...]:
    """Returns the files of the model's tensors; `copied` more files are counted in the names."""
    sizes = {tensor: prod(shape) * dtype.itemsize for tensor, (shape, dtype) in outputs.items()}
    file_tensors = list(groups(sizes, sizes.__getitem__, file_bytes))
    files = []
    for name, tensors in zip(file_names(len(file_tensors) + copied), file_tensors, strict=False):
        # Whole pages first: a tensor of another size would shift all following tensors. Then wide types first: every
        # tensor has to begin at a multiple of its type's size.
        tensors.sort(key=lambda t: (sizes[t] % PAGE_BYTES != 0, -outputs[t][1].itemsize))
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        ends = list(accumulate(sizes[t] for t in tensors))
        begins = [0, *ends[:-1]]
        for tensor, begin, end in zip(tensors, begins, ends, strict=True):
            shape, dtype = outputs[tensor]
            entries[tensor] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        header = header_bytes(entries, PAGE_BYTES)
        offsets = {tensor: len(header) + begin for tensor, begin in zip(tensors, begins, strict=True)}
        files.append(OutputFile(name, header, offsets, len(header) + ends[-1]))
    return tuple(files)


def _batches(
    file: OutputFile, shapes: Mapping[str, tuple[int, ...]], itemsize: int, fp8: Fp8Source
) -> Iterator[tuple[Slab, ...]]:
    """Yields the file's tensors as runs of rows, a full buffer at a time (at least one row, or one row of blocks).

    Scales are in no batch: they are written with the rows of their blocks.
    """
    batch: list[Slab] = []
    remaining = SLAB_BYTES
    for tensor in file.offsets:
        if tensor not in shapes:
            if batch:
                yield tuple(batch)
            batch, remaining = [], SLAB_BYTES
            continue
        rows, *rest = shapes[tensor]
        width, step = prod(rest) * itemsize, BLOCK if tensor in fp8.matrices else 1
        first = 0
        while first < rows:
            if batch and width * min(step, rows - first) > remaining:
                yield tuple(batch)
                batch, remaining = [], SLAB_BYTES
            count = min(rows - first, max(1, remaining // width // step) * step)
            batch.append(Slab(tensor, first, count))
            first, remaining = first + count, remaining - count * width
    if batch:
        yield tuple(batch)
