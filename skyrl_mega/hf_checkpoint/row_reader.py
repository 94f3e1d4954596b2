"""Reads tensors with another order of axes on disk (`models.disk_form`), or in MXFP4, a few whole rows at a time.

A row is an entry of the first axis: an expert. A box of such a tensor is scattered over the row on disk, so the row is
read in full and cut in memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from skyrl_mega.hf_checkpoint.box_files import CHUNK_BYTES
from skyrl_mega.hf_checkpoint.box_header import Damaged
from skyrl_mega.hf_checkpoint.index import MXFP4_DTYPE, TensorEntry
from skyrl_mega.hf_checkpoint.tensor_reader import TensorReader
from skyrl_mega.kernels import mxfp4
from skyrl_mega.models.disk_form import DiskForm, Shape
from skyrl_mega.parallel.box import Box


def read_rows(
    reader: TensorReader,
    name: str,
    entry: TensorEntry,
    form: DiskForm,
    shape: Shape,
    parts: Sequence[tuple[Box, Tensor]],
) -> None:
    """Fills local tensors with boxes of a tensor, converted to the local tensor's dtype.

    Memory: `CHUNK_BYTES` on disk (at least a row), and in MXFP4 as many numbers in the local tensor's dtype.

    Args:
        reader: The reader of the files.
        name: Name of the tensor, for errors.
        entry: The tensor's numbers, or MXFP4 blocks with their scales.
        form: Order of the axes on disk; not used for MXFP4.
        shape: Shape of the global tensor.
        parts: At least one box of the global tensor, each with a local tensor of the box's shape on any device.

    Raises:
        Damaged: The file ends before the tensor does, or an MXFP4 scale is no number.
        OSError: The file cannot be opened or read.
    """
    first = min(box.start[0] for box, _ in parts)
    stop = max(box.start[0] + box.shape[0] for box, _ in parts)
    step = max(1, CHUNK_BYTES * shape[0] // entry.nbytes)
    for at in range(first, stop, step):
        rows = Box((at, *(0,) * (len(shape) - 1)), (min(step, stop - at), *shape[1:]))
        overlaps = [(cut, box, into) for box, into in parts if (cut := box.intersect(rows))]
        if not overlaps:
            continue
        values = _rows(reader, name, entry, form, rows, overlaps[0][2].dtype)
        for cut, box, into in overlaps:
            into[cut.inside(box)].copy_(values[cut.inside(rows)])


def _rows(reader: TensorReader, name: str, entry: TensorEntry, form: DiskForm, rows: Box, dtype: torch.dtype) -> Tensor:
    """Returns whole rows of the global tensor; `dtype` is the type of the numbers of MXFP4."""
    if entry.dtype != MXFP4_DTYPE:
        return form.from_disk(reader.rows(name, entry, rows.start[0], rows.shape[0]), rows.shape)
    assert entry.scales is not None
    blocks = reader.rows(name, entry, rows.start[0], rows.shape[0]).clone()  # the next call uses the same buffer
    scales = reader.rows(name, entry.scales, rows.start[0], rows.shape[0])
    if bool((scales == mxfp4.NOT_A_NUMBER).any()):
        raise Damaged(f"{entry.scales.file}: {name}: an MXFP4 scale is 255, which is no number")
    return mxfp4.dequantise(blocks, scales, dtype).view(rows.shape)
