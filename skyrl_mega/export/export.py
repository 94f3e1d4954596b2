"""An export from start to end: check, plan, write, verify, and finally rename the directory."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch

from skyrl_mega.cluster.atomic_output import atomic_folder, being_written
from skyrl_mega.common.errors import UserError
from skyrl_mega.common.safe_read import writing
from skyrl_mega.export.job import ExportJob, Fp8Source, Origin, plan_job
from skyrl_mega.export.pool import run
from skyrl_mega.export.progress import Progress
from skyrl_mega.export.source import CheckpointSource, check_output, disk_of
from skyrl_mega.export.work import ReadRows
from skyrl_mega.hf_checkpoint.box_files import compare, read_entries
from skyrl_mega.hf_checkpoint.box_header import read_header
from skyrl_mega.hf_checkpoint.companion_files import write_companion_files
from skyrl_mega.hf_checkpoint.copied import copies
from skyrl_mega.hf_checkpoint.crc import joined
from skyrl_mega.hf_checkpoint.index import check_tensors
from skyrl_mega.models.quantization import block_fp8
from skyrl_mega.models.registry import architecture

BLOCK_FP8 = "block-fp8"
"""Name of files in the block FP8 of the model directory."""
_SPARE_BYTES = 64 << 20
"""Disk space for index, tokenizer and file system, besides the weights."""


@dataclass(frozen=True)
class ExportResult:
    """Facts about a finished export."""

    output: str
    """The written directory."""
    checkpoint: str
    """Folder of the exported checkpoint."""
    dtype: str
    """Type of the files: `bfloat16`, `float32` or `block-fp8`."""
    tensors: int
    """Number of the model's tensors, without scales and copied tensors."""
    files: int
    """Number of safetensors files, including files of copied tensors."""
    nbytes: int
    """Bytes of all tensors in the files, including scales and copied tensors."""
    seconds: float
    """Seconds from the first check to the final rename, without verification."""
    verified: bool
    """True if every tensor was read back and compared."""
    without_master: tuple[str, ...]
    """With origin "master", names of the tensors exported from the model's weights because the optimizer holds no
    copy."""
    copied: int
    """Number of tensors copied from the model directory, because the model lacks such tensors."""
    copied_bytes: int
    """Bytes of the copied tensors, included in `nbytes`."""


def export(
    source: CheckpointSource,
    output: Path,
    *,
    dtype: torch.dtype | None = None,
    fp8: bool = False,
    origin: Origin = "weights",
    workers: int = 1,
    file_bytes: int = 5 << 30,
    verify: bool = False,
    progress: Progress | None = None,
) -> ExportResult:
    """Writes a checkpoint, compared with its checksums, as a complete Hugging Face directory or not at all.

    Args:
        source: The checkpoint.
        output: A new or empty directory.
        dtype: Type of the files; None means the type of the exported values: the model's, or float32 for "master".
        fp8: True for files in the block FP8 of the model directory; `dtype` is ignored.
        origin: Source of the exported values: the model's "weights", or the optimizer's float32 copies, "master".
        workers: Number of processes; each needs two buffers of `job.SLAB_BYTES`, or of a row if larger.
        file_bytes: Maximum size of a file (at least one tensor).
        verify: True to read every tensor back and compare bit by bit.
        progress: Receiver of progress reports.

    Raises:
        UserError: The checkpoint is incomplete or of another model, or lacks master weights for "master"; the model's
            family is unknown, or for `fp8` the model is not in block FP8; or the output is no new or empty directory,
            may not be written to, is being written by another export, or does not fit on the disk. Nothing has been
            written then.
        Damaged: A file of the checkpoint differs from the saved state. A UserError, but perhaps after writing began.
        WorkerDied: A worker was killed.
        ExportMismatch: The written data differs from the checkpoint; only with `verify`.
        OSError: The file system failed.
    """
    progress = progress or Progress(None)
    start = time.perf_counter()
    check_output(output)
    job = _plan(source, dtype, fp8, origin, file_bytes)
    _check_disk_space(output, job)
    if being_written(output):
        raise UserError("another export writes it now", key="--output", value=output, fix="wait for it, or end it")
    with atomic_folder(output, f"--output {output}", last="config.json") as partial:
        _write_tensors(job, partial, workers, progress)
        write_companion_files(partial, source.model, job.dtype, fp8)
        verify_s = _verify(job, partial, workers, progress) if verify else 0.0
    return ExportResult(
        output=str(output),
        checkpoint=str(source.folder),
        dtype=BLOCK_FP8 if fp8 else str(job.dtype).removeprefix("torch."),
        tensors=len(job.shapes),
        files=len(job.files) + len(job.copied),
        nbytes=job.nbytes,
        seconds=time.perf_counter() - start - verify_s,
        verified=verify,
        without_master=job.without_master,
        copied=sum(len(tensors) for tensors in job.copied.values()),
        copied_bytes=job.copied_bytes,
    )


def _plan(source: CheckpointSource, dtype: torch.dtype | None, fp8: bool, origin: Origin, file_bytes: int) -> ExportJob:
    """Returns the plan of an export, from the headers of all files."""
    header = read_header(source.folder)
    return plan_job(
        source.hf,
        header,
        read_entries(source.folder, header, header.tensors),
        dtype=dtype,
        origin=origin,
        file_bytes=file_bytes,
        fp8=_fp8_source(source) if fp8 else None,
        copied=copies(source.model, file_bytes),
    )


def _fp8_source(source: CheckpointSource) -> Fp8Source:
    """Returns the matrices in block FP8 of the model directory.

    Raises:
        UserError: The model directory is not in block FP8.
    """
    quantisation = block_fp8(source.hf)
    if quantisation is None:
        raise UserError(
            f"the model {source.model} is not in block FP8, and an export keeps the blocks of its source",
            key="--dtype",
            value=BLOCK_FP8,
            fix="give as-trained, bfloat16 or float32, or --model with the directory in FP8",
        )
    entries = check_tensors(source.model, architecture(source.hf).tensors(source.hf), quantisation)
    matrices = {name: entry for name, entry in entries.items() if entry.scales}
    return Fp8Source(matrices, quantisation.powers_of_two)


def _check_disk_space(output: Path, job: ExportJob) -> None:
    parent = disk_of(output)
    needed, free = job.nbytes + _SPARE_BYTES, shutil.disk_usage(parent).free
    if needed > free:
        raise UserError(
            f"{needed / 1000000000.0:.1f} GB are needed, {parent} has {free / 1000000000.0:.1f} GB",
            key="--output",
            value=output,
            fix="choose another place",
        )


def _write_tensors(job: ExportJob, partial: Path, workers: int, progress: Progress) -> None:
    """Writes the safetensors files: first every file with header and full size, then the data by the workers.

    Raises:
        Damaged: The data read differs from the data saved.
    """
    for file in job.files:
        with writing(partial / file.name), (partial / file.name).open("wb") as opened:
            opened.write(file.header)
            _allocate(opened.fileno(), file.nbytes)
    with progress.phase("write", job.nbytes) as phase:
        pieces: dict[int, list[ReadRows]] = defaultdict(list)
        for _, (size, read) in run(job, partial, "write", range(len(job.batches)), workers):
            for piece in read:
                pieces[piece.entry].append(piece)
            phase.advance(size)
        for number, entry in enumerate(job.entries):
            compare(entry, joined((piece.nbytes, piece.crc) for piece in sorted(pieces[number])))
        for _ in run(job, partial, "flush", range(len(job.files)), workers):
            pass
        for _, size in run(job, partial, "copy", range(len(job.copied)), workers) if job.copied else ():
            phase.advance(size)


def _verify(job: ExportJob, partial: Path, workers: int, progress: Progress) -> float:
    """Reads back and compares every tensor; returns the seconds spent."""
    compared, start = 0, time.perf_counter()
    with progress.phase("verify", job.elements * job.dtype.itemsize) as phase:
        for _, elements in run(job, partial, "compare", range(len(job.entries)), workers):
            compared += elements
            phase.advance(elements * job.dtype.itemsize)
        for _ in run(job, partial, "compare_blocks", range(len(job.batches)), workers) if job.fp8.matrices else ():
            pass
        for _ in run(job, partial, "compare_copy", range(len(job.copied)), workers) if job.copied else ():
            pass
    if compared != job.elements:
        raise AssertionError(f"{compared} elements compared, {job.elements} written")
    return time.perf_counter() - start


def _allocate(file: int, size: int) -> None:
    """Sets a file's size and, if the file system can, reserves disk space: later writes are faster, and a full disk
    fails now.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    # posix_fallocate would write to every block if the file system does not support it.
    if libc.fallocate(file, 0, ctypes.c_int64(0), ctypes.c_int64(size)):
        error = ctypes.get_errno()
        if error not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise OSError(error, os.strerror(error))
        os.ftruncate(file, size)
