"""What the policy has said in trajectories that are under way, so that it need not say it twice.

A run that resumes plays such a trajectory once more, from its prompt, in a new environment: what that one did cannot be
kept. Its turns are taken from here as long as all that comes before them is the same, token by token; where a tool
answers otherwise, the policy goes on from there.
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

from skyrl_mega.cluster.leftovers import partial_file
from skyrl_mega.config.errors import UserError
from skyrl_mega.config.terminal import one_line
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
"""Columns that are null where the engine gave no routes."""
_SMALL = [
    *("request", "asked", "tokens.list.element", "logprobs.list.element", "finish", "route_type"),
    *("versions.list.element.version", "versions.list.element.start", "route_shape.list.element"),
]
"""What Parquet calls all columns but the routes."""


@dataclass(frozen=True)
class Said:
    """One turn of the policy."""

    request: str
    """Its name."""
    asked: bytes
    """A digest of what was asked (`digest`)."""
    completion: Completion

    @property
    def trajectory(self) -> str:
        """Whose turn it was."""
        return self.request.rpartition("/")[0]


class Journal:
    """Of trajectories that are under way. Lives in one event loop, as its router."""

    def __init__(self) -> None:
        self._said: dict[str, dict[str, Said]] = {}
        """By trajectory, and by request."""

    def add(self, said: Iterable[Said]) -> None:
        """Takes in turns, also of trajectories that are about to be played."""
        for one in said:
            self._said.setdefault(one.trajectory, {})[one.request] = one

    def keep(self, request: Request, completion: Completion) -> None:
        """Takes in the answer to a request, unless only its time had ended."""
        if completion.finish != "timeout":
            self.add([Said(request.id, digest(request), completion)])

    def answer(self, request: Request) -> Completion | None:
        """What was said to a request with the same tokens and the same room; None where nothing was."""
        known = self._said.get(request.trajectory, {}).get(request.id)
        return known.completion if known is not None and known.asked == digest(request) else None

    def forget(self, trajectory: str) -> None:
        """It has ended."""
        self._said.pop(trajectory, None)

    def all(self) -> list[Said]:
        """All turns, trajectory by trajectory."""
        return [one for turns in self._said.values() for one in turns.values()]


def file_of(folder: Path, who: str) -> Path:
    """Of what somebody has played."""
    return folder / f"turns-{who}.parquet"


def read_all(folder: Path) -> dict[str, list[Said]]:
    """What everybody has written there, by trajectory."""
    found: dict[str, list[Said]] = {}
    for file in sorted(folder.glob("turns-*.parquet")):
        for one in read(file):
            found.setdefault(one.trajectory, []).append(one)
    return found


def digest(request: Request) -> bytes:
    """Of all that its answer begins with, of how long that may be, and of the tokens whose routes it brings."""
    given = np.asarray([request.max_tokens, request.routes_from, *request.tokens], np.int32)
    return hashlib.blake2b(given.tobytes(), digest_size=16).digest()


def write(file: Path, said: Sequence[Said]) -> None:
    """Writes turns as Parquet: all of them, or no file.

    Routes are most of the bytes, and no two of them are alike: they are written as they are.
    """
    made = [(one, one.completion) for one in said]
    columns = [
        [one.request for one in said],
        [one.asked for one in said],
        [np.asarray(c.tokens, np.int32) for _, c in made],
        [np.asarray(c.logprobs, np.float32) for _, c in made],
        [c.finish for _, c in made],
        [[{"version": version, "start": start} for version, start in c.versions] for _, c in made],
        [None if c.routes is None else c.routes.tobytes() for _, c in made],
        [None if c.routes is None else str(c.routes.dtype) for _, c in made],
        [None if c.routes is None else c.routes.shape for _, c in made],
    ]
    arrays = [pa.array(column, type=field.type) for column, field in zip(columns, _SCHEMA, strict=True)]
    table = pa.Table.from_arrays(arrays, schema=_SCHEMA)
    kinds = dict.fromkeys(_SMALL, "snappy") | {"routes": "none"}
    with partial_file(file) as partial:
        pq.write_table(table, partial, use_dictionary=_SMALL, compression=kinds, write_statistics=_SMALL)
        partial.replace(file)


def read(file: Path) -> list[Said]:
    """What `write` has written.

    Raises:
        UserError: The file has something else.
    """
    try:
        table = pq.read_table(file, schema=_SCHEMA)
        arrays = zip(_arrays(table["tokens"], "i"), _arrays(table["logprobs"], "f"), strict=True)
        names = ["request", "asked", "finish", "versions", *_OF_ROUTES]
        rows = zip(table.select(names).to_pylist(), arrays, strict=True)
        return [_said(row, tokens, logprobs) for row, (tokens, logprobs) in rows]
    except (pa.ArrowException, OSError, ValueError, TypeError) as error:
        raise UserError(f"{file}: it has no turns ({one_line(str(error))}); take another checkpoint") from error


def _said(row: dict[str, Any], tokens: array[int], logprobs: array[float]) -> Said:
    data, kind, shape = (row.pop(name) for name in _OF_ROUTES)
    if None in row.values() or len(tokens) != len(logprobs):
        raise ValueError(f"{row['request']} has {len(tokens)} tokens and {len(logprobs)} log-probs")
    versions = tuple((int(span["version"]), int(span["start"])) for span in row["versions"])
    routes = None if data is None else np.frombuffer(data, kind).reshape(shape)
    said = Completion(row["request"], tokens, logprobs, row["finish"], versions, routes)
    return Said(row["request"], row["asked"], said)


def _arrays(column: pa.ChunkedArray, kind: str) -> list[array[Any]]:
    """Of each row."""
    if column.null_count:
        raise ValueError("rows without tokens or log-probs")
    return [array(kind, row.values.to_numpy().tobytes()) for row in column]
