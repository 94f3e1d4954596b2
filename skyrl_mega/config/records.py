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
                for batch in reader.iter_batches(ROWS_AT_ONCE):
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
