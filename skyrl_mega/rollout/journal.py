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

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from skyrl_mega.engines.base import Completion, Request

_SCHEMA = pa.schema(
    {
        "request": pa.string(),
        "context": pa.binary(),
        "tokens": pa.list_(pa.int32()),
        "logprobs": pa.list_(pa.float32()),
        "finish": pa.string(),
        "versions": pa.list_(pa.struct({"version": pa.int64(), "start": pa.int64()})),
    }
)


@dataclass(frozen=True)
class Said:
    """One turn of the policy."""

    request: str
    """Its name."""
    context: bytes
    """A digest of all tokens before it."""
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
            self.add([Said(request.id, digest(request.tokens), completion)])

    def answer(self, request: Request) -> Completion | None:
        """What was said to a request with the same tokens; None where nothing was."""
        known = self._said.get(request.trajectory, {}).get(request.id)
        return known.completion if known is not None and known.context == digest(request.tokens) else None

    def forget(self, trajectory: str) -> None:
        """It has ended."""
        self._said.pop(trajectory, None)

    def all(self) -> list[Said]:
        """All turns, trajectory by trajectory."""
        return [one for turns in self._said.values() for one in turns.values()]


def digest(tokens: Sequence[int]) -> bytes:
    """Of a request's tokens."""
    return hashlib.blake2b(np.asarray(tokens, np.int32).tobytes(), digest_size=16).digest()


def write(file: Path, said: Sequence[Said]) -> None:
    """Writes turns as Parquet."""
    made = [(one, one.completion) for one in said]
    columns = [
        [one.request for one in said],
        [one.context for one in said],
        [np.asarray(c.tokens, np.int32) for _, c in made],
        [np.asarray(c.logprobs, np.float32) for _, c in made],
        [c.finish for _, c in made],
        [[{"version": version, "start": start} for version, start in c.versions] for _, c in made],
    ]
    arrays = [pa.array(column, type=field.type) for column, field in zip(columns, _SCHEMA, strict=True)]
    pq.write_table(pa.Table.from_arrays(arrays, schema=_SCHEMA), file)


def read(file: Path) -> list[Said]:
    """What `write` has written."""
    table = pq.read_table(file, schema=_SCHEMA)
    tokens, logprobs = (table[name].combine_chunks() for name in ("tokens", "logprobs"))
    rows = zip(*(table[name].to_pylist() for name in ("request", "context", "finish", "versions")), strict=True)
    return [
        Said(
            request,
            context,
            Completion(
                request,
                array("i", tokens[i].values.to_numpy()),
                array("f", logprobs[i].values.to_numpy()),
                finish,
                tuple((one["version"], one["start"]) for one in versions),
            ),
        )
        for i, (request, context, finish, versions) in enumerate(rows)
    ]
