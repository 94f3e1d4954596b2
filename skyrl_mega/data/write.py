"""Writer of rows to parquet files: atomic, and never replacing a file made or changed by a person."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from skyrl_mega.cluster.atomic_output import atomic_file
from skyrl_mega.common.errors import UserError

ROWS_AT_ONCE, BYTES_AT_ONCE = 20_000, 256 * 2**20
"""Maximum size of a row group; a single larger row is an exception."""
PROGRESS_AFTER_S = 3.0
"""Seconds between two lines of progress."""
_SHA256 = b"skyrl_mega.sha256"
"""Metadata key of the digest over all preceding bytes of the file."""


def write_rows(rows: Iterable[dict[str, Any]], file: Path) -> int:
    """Writes rows to a temporary neighbour of `file` and renames it at the end; returns the number of rows. Creates
    missing folders.

    The first row decides the columns: other keys of later rows are left out, missing keys become null. The first row
    group (`ROWS_AT_ONCE`, `BYTES_AT_ONCE`) decides the types. Without rows the file has no columns. On an error nothing
    is left behind and an older file stays unchanged.

    Raises:
        UserError: An existing `file` was not written by `write_rows` or was changed since; or a number is too large for
            parquet.
        OSError: The file cannot be written.
        pyarrow.ArrowException: A value does not have the type of its column.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    with atomic_file(file, f"--output {file.parent}", is_ours) as part, part.open("w+b") as out:
        pieces = _pieces(rows)
        first = _table(next(pieces, []), None, file)
        with pq.ParquetWriter(out, first.schema) as writer:
            writer.write_table(first)
            count += len(first)
            for piece in pieces:
                writer.write_table(_table(piece, first.schema, file))
                count += len(piece)
            out.flush()
            writer.add_key_value_metadata({_SHA256: _digest(out, out.tell())})
        out.flush()
        os.fsync(out.fileno())
    return count


def _pieces(rows: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yields the rows in lists, one per row group: readers load a whole row group."""
    piece, size = [], 0
    for row in rows:
        piece.append(row)
        size += _size(row)
        if len(piece) == ROWS_AT_ONCE or size >= BYTES_AT_ONCE:
            yield piece
            piece, size = [], 0
    if piece:
        yield piece


def _size(value: Any) -> int:
    """Returns the approximate size of a value in bytes."""
    if isinstance(value, dict):
        return sum(map(_size, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_size, value))
    return len(value) if isinstance(value, str | bytes) else 8


def _table(rows: list[dict[str, Any]], schema: pa.Schema | None, file: Path) -> pa.Table:
    try:
        return pa.Table.from_pylist(rows, schema=schema)
    except OverflowError as error:
        raise UserError("a row has a whole number of more than 64 bits", key=file, fix="write it as text") from error


def is_ours(file: Path) -> bool:
    """Returns True if `write_rows` wrote the file and the file is unchanged since; False also if it cannot be read."""
    try:
        stored_digest = (pq.read_metadata(file).metadata or {}).get(_SHA256)
        with file.open("rb") as stream:
            stream.seek(-8, os.SEEK_END)  # the length of the metadata, and PAR1
            end = stream.tell() - int.from_bytes(stream.read(4), "little")
            return stored_digest is not None and stored_digest.decode() == _digest(stream, end)
    except (OSError, pa.ArrowException):
        return False


def _digest(file: IO[bytes], end: int) -> str:
    """Returns the digest of a file's first `end` bytes and leaves the file position at `end`."""
    digest = hashlib.sha256()
    file.seek(0)
    while chunk := file.read(min(2**20, end - file.tell())):
        digest.update(chunk)
    return digest.hexdigest()


def with_progress(rows: Iterable[dict[str, Any]], label: str) -> Iterator[dict[str, Any]]:
    """Yields the same rows, and prints the number of rows with `label` to stderr every 3 seconds."""
    last_report = time.monotonic()
    for count, row in enumerate(rows, start=1):
        yield row
        if time.monotonic() - last_report > PROGRESS_AFTER_S:
            last_report = time.monotonic()
            print(f"{label}: {count} rows", file=sys.stderr, flush=True)
