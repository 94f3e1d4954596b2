"""Rows into parquet files: whole or not at all."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from skyrl_mega.cluster.leftovers import partial_file

ROWS_AT_ONCE = 20_000
PROGRESS_AFTER_S = 3.0


def write_rows(rows: Iterable[dict[str, Any]], file: Path) -> int:
    """Writes rows to `file` through a neighbour that takes its name at the end; returns how many.

    The first rows decide the schema. On an error nothing is left behind and an older file stays as it was.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    with partial_file(file) as part, part.open("wb") as out:
        rows = iter(rows)
        first = pa.Table.from_pylist(list(itertools.islice(rows, ROWS_AT_ONCE)))
        with pq.ParquetWriter(out, first.schema) as writer:
            writer.write_table(first)
            count += len(first)
            while chunk := list(itertools.islice(rows, ROWS_AT_ONCE)):
                writer.write_table(pa.Table.from_pylist(chunk, schema=first.schema))
                count += len(chunk)
        out.flush()
        os.fsync(out.fileno())
        part.replace(file)
    return count


def with_progress(rows: Iterable[dict[str, Any]], label: str) -> Iterator[dict[str, Any]]:
    """The same rows, with a line on stderr every 3 seconds."""
    said = time.monotonic()
    for count, row in enumerate(rows, start=1):
        yield row
        if time.monotonic() - said > PROGRESS_AFTER_S:
            said = time.monotonic()
            print(f"{label}: {count} rows", file=sys.stderr, flush=True)
