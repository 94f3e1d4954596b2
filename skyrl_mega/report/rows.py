"""Rows of a trajectory file or of an evaluation's samples. The types of all columns and the JSON texts are checked, and
an invalid file is rejected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from skyrl_mega.common import safe_read
from skyrl_mega.common.errors import UserError
from skyrl_mega.trajectories import parquet
from skyrl_mega.trajectories.trajectory import Status

TOKENS = ("tokens", "mask", "logprobs")
"""Columns read only for trajectories on display."""
UNREAD = ("columns",)
"""Columns never read by the report."""
NEEDED = (
    *("uid", "sample", "status", "reward", "turns", "response_length", "env_class", "metadata", "messages"),
    *("versions", "prompt_length", "seconds", "extras", *TOKENS),
)
"""Required columns of a trajectory file."""
EVALUATED = {"response_length": "response_tokens", "prompt_length": "prompt_tokens"}
"""Column → column name in an evaluation's samples, as these contain no tokens."""
ABSENT_THERE = (*EVALUATED, "versions", *TOKENS)
"""Optional columns of an evaluation's samples."""
JSON = ("metadata", "seconds", "extras")
"""Columns of JSON objects."""
_STATUSES = tuple(status.value for status in Status)
LARGEST = 2**34
"""Most unpacked bytes of a file's columns."""


def read(file: Path) -> list[dict[str, Any]]:
    """Returns all rows of a trajectory file, or of an evaluation's samples, as dicts, without the columns in `TOKENS`;
    JSON columns are decoded.

    Raises:
        UserError: The file cannot be read or does not contain trajectories.
    """
    try:
        rows = _table(file).to_pylist()
        for number, row in enumerate(rows):
            for name in JSON:
                row[name] = _object(row[name], number, name)
            row["tools"] = _tools(row.get("tools"), number)
            for step in row.get("steps") or ():
                step["tool_calls"] = tuple(map(json.loads, step["tool_calls"] or ()))
            if row["status"] not in _STATUSES:
                raise safe_read.Malformed(f"row {number}, status: allowed: {', '.join(Status)}")
            if any(message[key] is None for message in row["messages"] for key in ("role", "content")):
                raise safe_read.Malformed(f"row {number}, messages: one has no role or no content")
        return rows
    except (OSError, pa.ArrowException, ValueError, RecursionError) as error:  # ValueError: broken JSON or UTF-8
        raise _refusal(file, error) from error


def tokens(file: Path) -> pa.Table | None:
    """Returns the columns in `TOKENS` of all rows; None for samples of an evaluation, which contain no tokens.

    Raises:
        UserError: The file cannot be read, or the columns of a row differ in length.
    """
    try:
        safe_read.check_regular(file)
        if "tokens" not in pq.read_schema(file).names:
            return None
        table = pq.read_table(file, columns=list(TOKENS))
        typed = pa.table({name: table[name].cast(parquet.SCHEMA.field(name).type) for name in TOKENS})
        lengths = [pc.list_value_length(typed[name]) for name in TOKENS]
        if any(one.null_count or not one.equals(lengths[0]) for one in lengths):
            raise pa.ArrowInvalid(f"columns {', '.join(TOKENS)} have rows of different lengths, or without a value")
        return typed
    except (OSError, pa.ArrowException) as error:
        raise _refusal(file, error) from error


def _table(file: Path) -> pa.Table:
    """Returns all columns except tokens, with the names and types written by a run."""
    safe_read.check_regular(file)
    with pq.ParquetFile(file) as opened:
        names, about = opened.schema_arrow.names, opened.metadata
        size = sum(about.row_group(i).total_byte_size for i in range(about.num_row_groups))
        evaluated = set(EVALUATED.values()) <= set(names)
        needed = [name for name in NEEDED if not (evaluated and name in ABSENT_THERE)]
        if absent := [name for name in needed if name not in names]:
            raise pa.ArrowInvalid(f"it has no column {absent[0]}")
        if size > LARGEST:
            raise pa.ArrowInvalid(f"its columns have {size} bytes, allowed are {LARGEST}")
        read = [name for name in names if name not in (*TOKENS, *UNREAD)]
        table = opened.read(columns=read)
    columns = {name: table[name] for name in read if name in parquet.SCHEMA.names}
    if evaluated:
        columns |= {name: table[source] for name, source in EVALUATED.items()}
        columns["versions"] = pa.array([[]] * len(table), parquet.SCHEMA.field("versions").type)
    typed = {name: column.cast(parquet.SCHEMA.field(name).type) for name, column in columns.items()}
    empty = [name for name in (*needed, *EVALUATED) if name in typed and typed[name].null_count]
    if empty:
        raise pa.ArrowInvalid(f"column {empty[0]} has rows without a value")
    return pa.table(typed)


def _object(text: str, row: int, name: str) -> dict[str, Any]:
    value = json.loads(text)
    numbers = name != "seconds" or (
        isinstance(value, dict) and all(isinstance(part, int | float) for part in value.values())
    )
    if not isinstance(value, dict) or not numbers:
        raise safe_read.Malformed(f"row {row}, column {name}: it is no JSON object{'' if numbers else ' of numbers'}")
    return value


def _tools(text: str | None, row: int) -> list[dict[str, Any]]:
    """Returns the tools in the prompt; [] for an evaluation's samples."""
    value = json.loads(text or "[]")
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise safe_read.Malformed(f"row {row}, column tools: it is no JSON list of objects")
    return value


def _refusal(file: Path, error: Exception) -> UserError:
    reason = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
    return UserError(
        f"allowed: a file that a run wrote into trajectories/, or an evaluation's samples ({reason})", key=file
    )
