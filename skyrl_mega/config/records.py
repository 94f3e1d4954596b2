"""Rows that others wrote, as parquet, JSON or JSON lines: bounded, and each fault one line that names file and row."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from skyrl_mega.config import outside
from skyrl_mega.config.errors import UserError

ROWS_AT_ONCE = 10_000
BYTES_AT_ONCE = 256 * 2**20
"""Of a piece of a parquet file, at most."""
LARGEST_JSON = 2**30
"""Bytes of a `.json` file, which is read as a whole."""
ALLOWED = "allowed: an existing file, .jsonl, .json or .parquet"


def records(file: Path) -> Iterator[Any]:
    """Every row of a `.parquet`, `.json` (a list) or JSON-lines file; only a `.json` file is in memory as a whole.

    Raises:
        UserError: There is no such file, or it is not what its suffix says.
    """
    try:
        if file.suffix == ".parquet":
            outside.check_regular(file)
            with pq.ParquetFile(file) as reader:
                for batch in bounded_batches(reader, ROWS_AT_ONCE):
                    yield from batch.to_pylist()
        elif file.suffix == ".json":
            yield from _json(file)
        else:
            for index, (_, line) in enumerate(outside.lines(file)):
                yield _row(file, index, line)
    except FileNotFoundError as error:
        raise UserError(f"{file}: no such file; {ALLOWED}") from error
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        why = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise UserError(f"{file}: it cannot be read as {file.suffix or 'JSON lines'}: {why}; {ALLOWED}") from error


def bounded_batches(reader: pq.ParquetFile, most: int) -> Iterator[pa.RecordBatch]:
    """Yields a file's rows in pieces of at most `most` rows, and of bounded size.

    Arrow has no nested column of more than 2 GiB of text in one piece, though a file may have more in few rows. The
    size that a file states is that of its encoding, which holds a text that repeats only once: a piece that is too
    large is read again in halves.

    Raises:
        ArrowNotImplementedError: One row alone is too large.
    """
    for groups, count, size in _groups(reader, most):
        rows, done = max(1, min(most, BYTES_AT_ONCE * count // max(1, size))), 0
        while done < count:
            try:
                for batch in _after(done, reader.iter_batches(rows, row_groups=groups)):
                    yield batch
                    done += len(batch)
            except pa.ArrowNotImplementedError:
                if rows == 1:
                    raise
                rows = max(1, rows // 2)


def _groups(reader: pq.ParquetFile, most: int) -> Iterator[tuple[list[int], int, int]]:
    """Yields neighbouring row groups that may be read at once, their rows and their bytes."""
    taken, count, size = list[int](), 0, 0
    for index in range(reader.num_row_groups):
        group = reader.metadata.row_group(index)
        if taken and (count + group.num_rows > most or size + group.total_byte_size > BYTES_AT_ONCE):
            yield taken, count, size
            taken, count, size = [], 0, 0
        taken, count, size = [*taken, index], count + group.num_rows, size + group.total_byte_size
    if taken:
        yield taken, count, size


def _after(count: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yields the batches without their first `count` rows."""
    for batch in batches:
        if count < len(batch):
            yield batch.slice(count)
        count = max(0, count - len(batch))


def _json(file: Path) -> Iterator[Any]:
    try:
        rows = outside.parsed(outside.read(file, ALLOWED, most=LARGEST_JSON), most=LARGEST_JSON)
    except outside.Malformed as error:
        raise UserError(f"{file}: it cannot be read as .json: {error}; {ALLOWED}") from error
    if not isinstance(rows, list):
        raise UserError(f"{file}: it holds a {type(rows).__name__}; allowed is a list of rows")
    yield from rows


def _row(file: Path, index: int, line: bytes) -> Any:
    try:
        return outside.parsed(line)
    except outside.Malformed as error:
        form = file.suffix or "JSON lines"
        raise UserError(f"{file}, row {index}: it cannot be read as {form}: {error}; write it again") from error
