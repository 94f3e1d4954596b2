"""Recorded turns of unfinished trajectories, reused after a resume.

A resumed run repeats such a trajectory from the prompt in a new environment, because the state of the old environment
is lost. Recorded turns are reused as long as all tokens before a turn are identical. If a tool answers differently, the
policy generates from that point on.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from skyrl_mega.cluster.temporary_files import partial_file
from skyrl_mega.common.errors import UserError
from skyrl_mega.common.terminal import one_line
from skyrl_mega.engines.base import Completion, Request

_SCHEMA = pa.schema(
    {
        "request": pa.string(),
        "asked": pa.binary(),
        "tokens": pa.list_(pa.int32()),
        "logprobs": pa.list_(pa.float32()),
        "finish": pa.string(),
        "versions": pa.list_(pa.struct({"version": pa.int64(), "start": pa.int64()})),
        "routes": pa.binary(),
        "route_type": pa.string(),
        "route_shape": pa.list_(pa.int64()),
    }
)
_OF_ROUTES = ("routes", "route_type", "route_shape")
"""Columns that are null if the engine returned no routes."""
_SMALL = [
    *("request", "asked", "tokens.list.element", "logprobs.list.element", "finish", "route_type"),
    *("versions.list.element.version", "versions.list.element.start", "route_shape.list.element"),
]
"""Parquet paths of all columns except the routes."""


@dataclass(frozen=True)
class RecordedTurn:
    """A recorded turn of the policy."""

    request: str
    """Name of the request."""
    request_hash: bytes
    """Hash of the request (`digest`)."""
    completion: Completion
    """The engine's answer."""

    @property
    def trajectory(self) -> str:
        """Name of the trajectory: the part of `request` before the last `/`."""
        return self.request.rpartition("/")[0]


class Journal:
    """Store of recorded turns of unfinished trajectories, in memory. Lives in the event loop of the router."""

    def __init__(self) -> None:
        self._recorded: dict[str, dict[str, RecordedTurn]] = {}
        """Trajectory → request → turn."""

    def add(self, recorded: Iterable[RecordedTurn]) -> None:
        """Adds recorded turns, for example of an interrupted run; a turn of the same request is replaced."""
        for turn in recorded:
            self._recorded.setdefault(turn.trajectory, {})[turn.request] = turn

    def keep(self, request: Request, completion: Completion) -> None:
        """Records the answer to a request, unless a timeout ended the answer."""
        if completion.finish != "timeout":
            self.add([RecordedTurn(request.id, digest(request), completion)])

    def answer(self, request: Request) -> Completion | None:
        """Returns the recorded answer to a request; None unless a request with the same name, tokens, token limit and
        first position with routes was recorded. The time limits may differ."""
        known = self._recorded.get(request.trajectory, {}).get(request.id)
        return known.completion if known is not None and known.request_hash == digest(request) else None

    def forget(self, trajectory: str) -> None:
        """Drops the recorded turns of the trajectory with this name; called once it is finished."""
        self._recorded.pop(trajectory, None)

    def of(self, trajectory: str) -> list[RecordedTurn]:
        """Returns the recorded turns of the trajectory with this name."""
        return [*self._recorded.get(trajectory, {}).values()]

    def all(self) -> list[RecordedTurn]:
        """Returns all recorded turns, trajectory by trajectory."""
        return [turn for turns in self._recorded.values() for turn in turns.values()]


def file_of(folder: Path, who: str) -> Path:
    """Returns the path of a process's file of recorded turns.

    Args:
        folder: The checkpoint's folder for rollouts.
        who: Name of the process, unique in the folder.
    """
    return folder / f"turns-{who}.parquet"


def read_all(folder: Path) -> dict[str, list[RecordedTurn]]:
    """Reads the files of all processes in a folder and returns trajectory name → recorded turns; {} without files.
    Files are written atomically, so a killed process leaves no half file.

    Raises:
        UserError: A file cannot be read or contains something else than turns.
    """
    turns: dict[str, list[RecordedTurn]] = {}
    for file in sorted(folder.glob("turns-*.parquet")):
        for turn in read(file):
            turns.setdefault(turn.trajectory, []).append(turn)
    return turns


def digest(request: Request) -> bytes:
    """Returns a 16-byte hash of a request's tokens, token limit and first position with routes."""
    limits = np.asarray([request.max_tokens, request.routes_from], np.int32)
    tokens = np.asarray(request.tokens, np.int32)  # an array is read as it is: the context of every turn comes by here
    return hashlib.blake2b(limits.tobytes() + tokens.tobytes(), digest_size=16).digest()


def write(file: Path, recorded: Sequence[RecordedTurn]) -> None:
    """Writes turns to a Parquet file atomically; replaces an existing file. The folder must exist. Routes make up most
    of the bytes and hardly repeat, so compression is off for routes.

    Raises:
        OSError: The file cannot be written; names `file`.
    """
    completions = [(turn, turn.completion) for turn in recorded]
    columns = [
        [turn.request for turn in recorded],
        [turn.request_hash for turn in recorded],
        [np.asarray(c.tokens, np.int32) for _, c in completions],
        [np.asarray(c.logprobs, np.float32) for _, c in completions],
        [c.finish for _, c in completions],
        [[{"version": version, "start": start} for version, start in c.versions] for _, c in completions],
        [None if c.routes is None else c.routes.tobytes() for _, c in completions],
        [None if c.routes is None else str(c.routes.dtype) for _, c in completions],
        [None if c.routes is None else c.routes.shape for _, c in completions],
    ]
    arrays = [pa.array(column, type=field.type) for column, field in zip(columns, _SCHEMA, strict=True)]
    table = pa.Table.from_arrays(arrays, schema=_SCHEMA)
    kinds = dict.fromkeys(_SMALL, "snappy") | {"routes": "none"}
    with partial_file(file) as partial:
        pq.write_table(table, partial, use_dictionary=_SMALL, compression=kinds, write_statistics=_SMALL)
        partial.replace(file)


def read(file: Path) -> list[RecordedTurn]:
    """Returns the turns in a file written by `write`, in the same order.

    Raises:
        UserError: The file cannot be read or contains something else than turns.
    """
    try:
        table = pq.read_table(file, schema=_SCHEMA)
        arrays = zip(_arrays(table["tokens"], "i"), _arrays(table["logprobs"], "f"), strict=True)
        names = ["request", "asked", "finish", "versions", *_OF_ROUTES]
        rows = zip(table.select(names).to_pylist(), arrays, strict=True)
        return [_turn_of(row, tokens, logprobs) for row, (tokens, logprobs) in rows]
    except (pa.ArrowException, OSError, ValueError, TypeError) as error:
        raise UserError(
            f"it cannot be read as recorded turns ({one_line(str(error))})", key=file, fix="take another checkpoint"
        ) from error


def _turn_of(row: dict[str, Any], tokens: array[int], logprobs: array[float]) -> RecordedTurn:
    data, kind, shape = (row.pop(name) for name in _OF_ROUTES)
    if None in row.values() or len(tokens) != len(logprobs):
        raise ValueError(f"{row['request']} has {len(tokens)} tokens and {len(logprobs)} log-probs")
    versions = tuple((int(span["version"]), int(span["start"])) for span in row["versions"])
    routes = None if data is None else np.frombuffer(data, kind).reshape(shape)
    completion = Completion(row["request"], tokens, logprobs, row["finish"], versions, routes)
    return RecordedTurn(row["request"], row["asked"], completion)


def _arrays(column: pa.ChunkedArray, kind: str) -> list[array[Any]]:
    """Returns an array for each row."""
    if column.null_count:
        raise ValueError("rows without tokens or log-probs")
    return [array(kind, row.values.to_numpy().tobytes()) for row in column]
