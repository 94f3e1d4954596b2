"""Bounded reading of user data in parquet, JSON or JSON lines. Each error names file and row in a single line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from skyrl_mega.common import safe_read
from skyrl_mega.common.errors import UserError

ROWS_AT_ONCE = 10_000
BYTES_AT_ONCE = 256 * 2**20
"""Maximum bytes per batch read from a parquet file."""
LARGEST_JSON = 2**30
"""Maximum bytes of a `.json` file, read as a whole."""
ALLOWED = "allowed: an existing file, .jsonl, .json or .parquet"


def records(file: Path) -> Iterator[Any]:
    """Yields every row of a `.parquet`, `.json` (a list) or JSON-lines file; only a `.json` file is loaded as a whole.

    A row of a parquet file is a dict, a row of the other formats any JSON value. Every other suffix is read as JSON
    lines, without blank lines. Errors occur during iteration: rows before a wrong row have been yielded by then.

    Raises:
        UserError: The file does not exist or cannot be read, a row is not of the suffix's format, a `.json` file
            exceeds `LARGEST_JSON`, or a line exceeds `safe_read.MOST_BYTES`.
    """
    try:
        if file.suffix == ".parquet":
            safe_read.check_regular(file)
            with pq.ParquetFile(file) as reader:
                for batch in bounded_batches(reader, ROWS_AT_ONCE):
                    yield from batch.to_pylist()
        elif file.suffix == ".json":
            yield from _json(file)
        else:
            for index, (_, line) in enumerate(safe_read.read_lines(file)):
                yield _row(file, index, line)
    except FileNotFoundError as error:
        raise UserError("no such file", key=file, fix=ALLOWED) from error
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        why = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise UserError(f"it cannot be read as {file.suffix or 'JSON lines'}: {why}", key=file, fix=ALLOWED) from error


def bounded_batches(reader: pq.ParquetFile, most: int) -> Iterator[pa.RecordBatch]:
    """Yields a file's rows, in order and each once, in batches of at most `most` rows and about `BYTES_AT_ONCE` encoded
    bytes.

    Arrow supports at most 2 GiB of text per batch in a nested column; a file may exceed this with few rows. The size
    stated in a file is the encoded size, and repeated text is encoded only once. Therefore a batch found to be too
    large is read again in halves.

    Raises:
        ArrowNotImplementedError: A single row is too large.
        OSError, pyarrow.ArrowException: The file is damaged.
    """
    for groups, count, size in _groups(reader, most):
        rows, done = max(1, min(most, BYTES_AT_ONCE * count // max(1, size))), 0
        while done < count:
            try:
                for batch in _skip_rows(done, reader.iter_batches(rows, row_groups=groups)):
                    yield batch
                    done += len(batch)
            except pa.ArrowNotImplementedError:
                if rows == 1:
                    raise
                rows = max(1, rows // 2)


def _groups(reader: pq.ParquetFile, most: int) -> Iterator[tuple[list[int], int, int]]:
    """Yields adjacent row groups to read together, with row count and bytes."""
    groups, count, size = list[int](), 0, 0
    for index in range(reader.num_row_groups):
        group = reader.metadata.row_group(index)
        if groups and (count + group.num_rows > most or size + group.total_byte_size > BYTES_AT_ONCE):
            yield groups, count, size
            groups, count, size = [], 0, 0
        groups, count, size = [*groups, index], count + group.num_rows, size + group.total_byte_size
    if groups:
        yield groups, count, size


def _skip_rows(count: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yields the batches without the first `count` rows."""
    for batch in batches:
        if count < len(batch):
            yield batch.slice(count)
        count = max(0, count - len(batch))


def _json(file: Path) -> Iterator[Any]:
    try:
        rows = safe_read.parse_json(safe_read.read(file, ALLOWED, most=LARGEST_JSON), most=LARGEST_JSON)
    except safe_read.Malformed as error:
        raise UserError(
            f"it cannot be read as .json: {error}", key=file, fix="write it as a JSON list, or as .jsonl"
        ) from error
    if not isinstance(rows, list):
        raise UserError(f"it holds a {type(rows).__name__}; allowed is a list of rows", key=file)
    yield from rows


def _row(file: Path, index: int, line: bytes) -> Any:
    try:
        return safe_read.parse_json(line)
    except safe_read.Malformed as error:
        form = file.suffix or "JSON lines"
        raise UserError(
            f"it cannot be read as {form}: {error}", key=f"{file}, row {index}", fix="correct this row"
        ) from error
