"""An export from start to end: check, plan, write, verify, and finally rename the directory."""

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

from skyrl_mega.cluster.atomic_output import atomic_folder, being_written
from skyrl_mega.common.errors import UserError
from skyrl_mega.common.safe_read import writing
from skyrl_mega.export.job import ExportJob, Origin, plan_job
from skyrl_mega.export.pool import run
from skyrl_mega.export.progress import Progress
from skyrl_mega.export.source import CheckpointSource, check_output, disk_of
from skyrl_mega.export.work import ReadRows
from skyrl_mega.hf_checkpoint.box_files import compare, read_entries
from skyrl_mega.hf_checkpoint.box_header import read_header
from skyrl_mega.hf_checkpoint.crc import joined
from skyrl_mega.hf_checkpoint.load import write_companion_files

_SPARE_BYTES = 64 << 20
"""Disk space for index, tokenizer and file system, besides the weights."""


@dataclass(frozen=True)
class ExportResult:
    """The result of an export."""

    output: str
    checkpoint: str
    dtype: str
    tensors: int
    files: int
    nbytes: int
    """Bytes of all tensors."""
    seconds: float
    """Seconds from the first check to the final rename, without verification."""
    verified: bool
    """True if every tensor was read back and compared."""
    without_master: tuple[str, ...]
    """Tensors exported from the model's weights, because the optimizer holds no copy."""


def export(
    source: CheckpointSource,
    output: Path,
    *,
    dtype: torch.dtype | None = None,
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
        dtype: Type of the files; None means the type of the exported values.
        origin: Source of the exported values.
        workers: Number of processes; each needs two buffers of `job.SLAB_BYTES`, or of one row if larger.
        file_bytes: Maximum size of a file (at least one tensor).
        verify: True to read every tensor back and compare it with the checkpoint, bit by bit.
        progress: Receiver of progress reports.

    Raises:
        UserError: The checkpoint is incomplete, of another model or of another type; or the output exists already or
            does not fit on the disk. Nothing has been written then.
        Damaged: A file of the checkpoint differs from the saved state. Everything written is removed.
        WorkerDied: A worker was killed.
        ExportMismatch: The written data differs from the checkpoint.
        OSError: The file system failed.
    """
    progress = progress or Progress(None)
    start = time.perf_counter()
    check_output(output)
    header = read_header(source.folder)
    entries = read_entries(source.folder, header, header.tensors)
    job = plan_job(source.hf, header, entries, dtype=dtype, origin=origin, file_bytes=file_bytes)
    _check_disk_space(output, job)
    verify_s = 0.0
    if being_written(output):
        raise UserError("another export writes it now", key="--output", value=output, fix="wait for it, or end it")
    with atomic_folder(output, f"--output {output}", last="config.json") as partial:
        _write_tensors(job, partial, workers, progress)
        write_companion_files(partial, source.model, {f.name: list(f.offsets) for f in job.files}, job.nbytes)
        _write_dtype(partial / "config.json", job.dtype)
        if verify:
            verify_s = time.perf_counter()
            _verify(job, partial, workers, progress)
            verify_s = time.perf_counter() - verify_s
    return ExportResult(
        output=str(output),
        checkpoint=str(source.folder),
        dtype=str(job.dtype).removeprefix("torch."),
        tensors=len(job.shapes),
        files=len(job.files),
        nbytes=job.nbytes,
        seconds=time.perf_counter() - start - verify_s,
        verified=verify,
        without_master=job.without_master,
    )


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


def _verify(job: ExportJob, partial: Path, workers: int, progress: Progress) -> None:
    compared = 0
    with progress.phase("verify", job.nbytes) as phase:
        for index, elements in run(job, partial, "compare", range(len(job.entries)), workers):
            size = elements * job.type_of(job.entries[index].tensor).itemsize
            compared += size
            phase.advance(size)
    if compared != job.nbytes:
        raise AssertionError(f"{compared} bytes compared, {job.nbytes} written")


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


def _write_dtype(file: Path, dtype: torch.dtype) -> None:
    """Writes the files' type into config.json, for loaders."""
    hf: dict[str, Any] = json.loads(file.read_text())
    name = str(dtype).removeprefix("torch.")
    keys = [key for key in ("dtype", "torch_dtype") if key in hf] or ["torch_dtype"]
    if any(hf.get(key) != name for key in keys):
        file.write_text(json.dumps({**hf, **dict.fromkeys(keys, name)}, indent=2) + "\n")
