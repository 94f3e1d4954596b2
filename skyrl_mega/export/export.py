"""An export from beginning to end: look, plan, write, prove, and only then give the directory its name."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from skyrl_mega.cluster.whole import being_written, whole_folder
from skyrl_mega.config.errors import UserError
from skyrl_mega.config.safe_read import writing
from skyrl_mega.export.job import Job, Origin, plan_job
from skyrl_mega.export.pool import run
from skyrl_mega.export.progress import Progress
from skyrl_mega.export.source import Source, check_output, disk_of
from skyrl_mega.export.work import Piece
from skyrl_mega.hf_checkpoint.box_files import compare, read_entries
from skyrl_mega.hf_checkpoint.box_header import read_header
from skyrl_mega.hf_checkpoint.crc import joined
from skyrl_mega.hf_checkpoint.load import write_beside

_SPARE_BYTES = 64 << 20
"""What index, tokenizer and file system need besides the weights."""


@dataclass(frozen=True)
class Exported:
    """What was done."""

    output: str
    checkpoint: str
    dtype: str
    tensors: int
    files: int
    nbytes: int
    """Of all tensors."""
    seconds: float
    """From the first look to the name; verification is not counted."""
    verified: bool
    """Whether every tensor was read back and compared."""
    without_master: tuple[str, ...]
    """Tensors whose weights were taken, because the optimizer holds no copy of them."""


def export(
    source: Source,
    output: Path,
    *,
    dtype: torch.dtype | None = None,
    origin: Origin = "weights",
    workers: int = 1,
    file_bytes: int = 5 << 30,
    verify: bool = False,
    progress: Progress | None = None,
) -> Exported:
    """Writes a checkpoint, compared with its check sums, as a Hugging Face directory. It appears whole, or not at all.

    Args:
        source: the checkpoint.
        output: a new or an empty directory.
        dtype: of the files; None is that of what is exported.
        origin: what is exported.
        workers: processes; each needs two buffers of `job.SLAB_BYTES`, or of one row where that is more.
        file_bytes: size of one file at most (one tensor at least).
        verify: read every tensor back and compare it with the checkpoint, bit by bit.
        progress: who is told how far it is.

    Raises:
        UserError: the checkpoint is not whole, of another model or of another type; the output is there already or
            does not fit on the disk. Nothing has been written then.
        Damaged: A file of the checkpoint is not as it was saved. Nothing is left of what was written.
        WorkerDied: a worker was killed.
        Different: what was written is not what the checkpoint holds.
        OSError: the file system failed.
    """
    progress = progress or Progress(None)
    start = time.perf_counter()
    check_output(output)
    header = read_header(source.folder)
    entries = read_entries(source.folder, header, header.tensors)
    job = plan_job(source.hf, header, entries, dtype=dtype, origin=origin, file_bytes=file_bytes)
    _check_room(output, job)
    proving = 0.0
    if being_written(output):
        raise UserError(f"--output {output}: another export writes it now; wait for it, or end it")
    with whole_folder(output, f"--output {output}", last="config.json") as partial:
        _write_tensors(job, partial, workers, progress)
        write_beside(partial, source.model, {f.name: list(f.offsets) for f in job.files}, job.nbytes)
        _say_dtype(partial / "config.json", job.dtype)
        if verify:
            proving = time.perf_counter()
            _prove(job, partial, workers, progress)
            proving = time.perf_counter() - proving
    return Exported(
        output=str(output),
        checkpoint=str(source.folder),
        dtype=str(job.dtype).removeprefix("torch."),
        tensors=len(job.shapes),
        files=len(job.files),
        nbytes=job.nbytes,
        seconds=time.perf_counter() - start - proving,
        verified=verify,
        without_master=job.without_master,
    )


def _check_room(output: Path, job: Job) -> None:
    parent = disk_of(output)
    needed, free = job.nbytes + _SPARE_BYTES, shutil.disk_usage(parent).free
    if needed > free:
        raise UserError(
            f"--output {output}: {needed / 1e9:.1f} GB are needed, {parent} has {free / 1e9:.1f} GB; choose another "
            "place"
        )


def _write_tensors(job: Job, partial: Path, workers: int, progress: Progress) -> None:
    """Writes the safetensors files: every one with its header and its whole size first, then the workers fill them.

    Raises:
        Damaged: What was read is not what was saved.
    """
    for file in job.files:
        with writing(partial / file.name), (partial / file.name).open("wb") as opened:
            opened.write(file.header)
            _allocate(opened.fileno(), file.nbytes)
    with progress.phase("write", job.nbytes) as phase:
        pieces: dict[int, list[Piece]] = defaultdict(list)
        for _, (size, read) in run(job, partial, "write", range(len(job.batches)), workers):
            for piece in read:
                pieces[piece.entry].append(piece)
            phase.advance(size)
        for number, entry in enumerate(job.entries):
            compare(entry, joined((piece.nbytes, piece.crc) for piece in sorted(pieces[number])))
        for _ in run(job, partial, "flush", range(len(job.files)), workers):
            pass


def _prove(job: Job, partial: Path, workers: int, progress: Progress) -> None:
    compared = 0
    with progress.phase("verify", job.nbytes) as phase:
        for _, elements in run(job, partial, "compare", range(len(job.entries)), workers):
            compared += elements
            phase.advance(elements * job.dtype.itemsize)
    if compared * job.dtype.itemsize != job.nbytes:
        raise AssertionError(f"{compared} elements compared, {job.nbytes // job.dtype.itemsize} written")


def _allocate(file: int, size: int) -> None:
    """Gives a file its size and, where the file system can, its place on the disk: later writes into it are faster, and
    a disk that is too full says so now."""
    libc = ctypes.CDLL(None, use_errno=True)
    # posix_fallocate would write to every block where the file system cannot do it.
    if libc.fallocate(file, 0, ctypes.c_int64(0), ctypes.c_int64(size)):
        error = ctypes.get_errno()
        if error not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise OSError(error, os.strerror(error))
        os.ftruncate(file, size)


def _say_dtype(file: Path, dtype: torch.dtype) -> None:
    """config.json names the type of the files, which who loads them goes by."""
    hf: dict[str, Any] = json.loads(file.read_text())
    name = str(dtype).removeprefix("torch.")
    keys = [key for key in ("dtype", "torch_dtype") if key in hf] or ["torch_dtype"]
    if any(hf.get(key) != name for key in keys):
        file.write_text(json.dumps({**hf, **dict.fromkeys(keys, name)}, indent=2) + "\n")
