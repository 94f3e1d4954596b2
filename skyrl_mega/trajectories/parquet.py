"""Trajectory files: parquet readable by people and programs."""

from __future__ import annotations

import json
import math
import os
from array import array
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from skyrl_mega.cluster.errors import ClusterError, cause_of
from skyrl_mega.cluster.temporary_files import partial_file
from skyrl_mega.common.safe_read import check_regular
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.trajectories.by_reference import fetch_arrays
from skyrl_mega.trajectories.remote_arrays import arrays_lost
from skyrl_mega.trajectories.trajectory import GREEDY, Kind, Status, Trajectory, TrajectoryStep

if TYPE_CHECKING:
    from skyrl_mega.trajectories.sequences import Column

MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))

STEPS = pa.list_(
    pa.struct(
        [
            ("kind", pa.string()),
            ("start", pa.int32()),
            ("end", pa.int32()),
            ("at_s", pa.float64()),
            ("generate_s", pa.float64()),
            ("env_s", pa.float64()),
            ("messages", pa.int32()),
            ("reward", pa.float64()),
            ("finish", pa.string()),
            ("tool_calls", pa.list_(pa.string())),
        ]
    )
)
"""Fields of `trajectory.TrajectoryStep`; a tool call is JSON."""

COLUMNS = pa.list_(
    pa.struct(
        [
            ("name", pa.string()),
            ("aligned", pa.string()),
            ("dtype", pa.string()),
            ("shape", pa.list_(pa.int64())),
            ("values", pa.binary()),
        ]
    )
)
"""Fields of `Trajectory.columns`; `values` is the array's memory in row-major order."""

SCHEMA = pa.schema(
    [
        ("uid", pa.int64()),
        ("sample", pa.int32()),
        ("status", pa.string()),
        ("reward", pa.float64()),
        ("rewards", pa.string()),
        ("prompt", pa.string()),
        ("response", pa.string()),
        ("turns", pa.int32()),
        ("response_length", pa.int32()),
        ("env_class", pa.string()),
        ("metadata", pa.string()),
        ("messages", MESSAGES),
        ("steps", STEPS),
        ("versions", pa.list_(pa.struct([("version", pa.int64()), ("start", pa.int32())]))),
        ("prompt_length", pa.int32()),
        ("tokens", pa.list_(pa.int32())),
        ("mask", pa.list_(pa.int8())),
        ("logprobs", pa.list_(pa.float32())),
        ("seconds", pa.string()),
        ("prompt_messages", MESSAGES),
        ("extras", pa.string()),
        ("tools", pa.string()),
        ("columns", COLUMNS),
    ]
)
"""Columns for people first, then columns for programs. `metadata`, `rewards`, `seconds`, `extras` and `tools` are
JSON."""

BY_TOKEN = {"tokens": "i", "mask": "b", "logprobs": "f"}
"""Columns with an entry per token → type code of `Trajectory`'s arrays. All other columns are in `ROWS`."""
ROWS = pa.schema([column for column in SCHEMA if column.name not in BY_TOKEN])
PIECE = 256
"""Trajectories converted to columns at once."""
WRITE_S = 3600.0
"""Longest time in seconds for writing a file in a separate process."""


def write(path: Path, trajectories: list[Trajectory], *, columns: bool = False) -> None:
    """Writes trajectories to a parquet file atomically, a row each, and replaces an existing file. Fetches remote
    arrays in pieces.

    Args:
        path: The file. Its folder is created if only the last level is missing.
        trajectories: The trajectories; none give a file without rows.
        columns: Includes `Trajectory.columns`, which may be many times larger than everything else
            (`telemetry.trajectory_columns`).

    Raises:
        ClusterError: Remote arrays are lost.
        OSError: The file cannot be written.
    """
    path.parent.mkdir(exist_ok=True)  # no parents: if the run's folder is gone, so is its disk
    # Columns with few repeated values (tokens, log-probs, responses) gain nothing from a dictionary.
    plain = [column.name for column in ROWS if column.name != "response"]
    with partial_file(path) as partial:
        with pq.ParquetWriter(partial, SCHEMA, compression="zstd", use_dictionary=plain) as writer:
            for start in range(0, len(trajectories), PIECE):
                writer.write_table(_table([fetch_arrays(t) for t in trajectories[start : start + PIECE]], columns))
        os.replace(partial, path)


def write_apart(path: Path, trajectories: list[Trajectory], *, columns: bool = False) -> None:
    """Writes trajectories as `write` does. If any trajectory has remote arrays, a Ray task writes the file, so that the
    arrays never enter this process; waits for the task. `columns` as in `write`.

    Raises:
        ClusterError: The arrays or the task are lost, or writing took more than `WRITE_S` seconds.
        OSError: The file cannot be written.
    """
    if not any(t.remote_arrays for t in trajectories):
        write(path, trajectories, columns=columns)
        return
    import ray

    apart = ray.remote(num_cpus=0)(write)
    writing = apart.remote(path.absolute(), trajectories, columns=columns)
    try:
        ray.get(writing, timeout=WRITE_S)
    except ray.exceptions.GetTimeoutError as error:
        ray.cancel(writing, force=True)
        raise ClusterError(f"{path}: it was not written within {WRITE_S:g} s; is the disk slow?") from error
    except ray.exceptions.RayTaskError as error:
        raise cause_of(error) from None
    except ray.exceptions.RayError as error:
        raise arrays_lost(error) from error


def read(path: Path) -> list[Trajectory]:
    """Reads all trajectories of a file, in the order of the rows. Values unknown to JSON come back as lists (tuples) or
    strings (sets); `Trajectory.retries` is not stored and comes back as 0.

    Raises:
        OSError: The file is missing or cannot be read.
        pyarrow.ArrowException: The file is not parquet, or its columns have other types.
        TypeError, ValueError: The file was not written by `write`.
    """
    return [t for some in read_some(path) for t in some]


def read_some(path: Path) -> Iterator[list[Trajectory]]:
    """Yields a file's trajectories in lists of at most `PIECE`, in the order of the rows. The file is read piece by
    piece, so that a caller storing each list elsewhere never holds all.

    Raises:
        OSError: The file is missing or cannot be read. All errors are raised during the iteration.
        pyarrow.ArrowException: The file is not parquet, or its columns have other types.
        TypeError, ValueError: The file was not written by `write`.
    """
    rows = ds.dataset(path, schema=SCHEMA, format="parquet")
    for batch in rows.to_batches(batch_size=PIECE, batch_readahead=1, fragment_readahead=1):
        yield _of_table(pa.Table.from_batches([batch]))


def _of_table(table: pa.Table) -> list[Trajectory]:
    by_token = [
        [array(kind, of_one.values.to_numpy().tobytes()) for of_one in table[name]] for name, kind in BY_TOKEN.items()
    ]
    rows = table.select(ROWS.names).to_pylist()
    return [_trajectory(*parts) for parts in zip(rows, *by_token, strict=True)]


def read_steps(path: Path) -> list[list[list[TrajectoryStep]]]:
    """Reads only the column `steps` of a file and returns, for each group of samples, for each sample, its steps.

    Greedy answers are left out. A prompt sampled twice gives two groups. Groups and samples are in the order of the
    rows; [] without rows.

    Raises:
        ValueError: The file is not parquet, lacks a column, or contains impossible spans or seconds.
        OSError: The file cannot be read.
    """
    try:
        check_regular(path)
        with pq.ParquetFile(path) as file:
            if missing := {"uid", "sample", "steps"} - {*file.schema_arrow.names}:
                raise ValueError(f"it has no column {min(missing)}")
            table = file.read(["uid", "sample", "steps"])
            names = zip(*(table[name].cast(pa.int64()).to_pylist() for name in ("uid", "sample")), strict=True)
            rows = table["steps"].cast(STEPS).to_pylist()
    except pa.ArrowException as error:  # not all Arrow errors are ValueErrors
        raise ValueError(str(error)) from error
    groups: dict[tuple[Any, int], list[list[TrajectoryStep]]] = {}
    seen: Counter[tuple[Any, Any]] = Counter()  # a batch across an epoch's end may contain a prompt twice
    for (uid, sample), steps in zip(names, rows, strict=True):
        if sample != GREEDY:
            groups.setdefault((uid, seen[uid, sample]), []).append([_checked(step) for step in steps or ()])
            seen[uid, sample] += 1
    return [*groups.values()]


def _checked(row: dict[str, Any] | None) -> TrajectoryStep:
    """Returns a step of an untrusted file. Raises ValueError if a field is invalid."""
    try:
        step = _step(row or {})
        if 0 <= step.start <= step.end and 0 <= step.env_s < math.inf:
            return step
    except (TypeError, KeyError, ValueError):
        pass
    raise ValueError(f"its column steps has {row}")


def _table(trajectories: list[Trajectory], columns: bool) -> pa.Table:
    """Returns the trajectories as a table. Per-token values never become Python objects."""
    more = [_columns(t) if columns else [] for t in trajectories]
    rows = pa.Table.from_pylist([_row(t) | {"columns": of} for t, of in zip(trajectories, more, strict=True)], ROWS)
    ends = np.cumsum([0, *(len(t.tokens) for t in trajectories)])
    by_token = {
        name: pa.ListArray.from_arrays(
            pa.array(ends, pa.int32()), pa.array(np.concatenate([getattr(t, name) for t in trajectories]))
        )
        for name in BY_TOKEN
    }
    table = {**dict(zip(ROWS.names, rows.columns, strict=True)), **by_token}
    return pa.table([table[name] for name in SCHEMA.names], schema=SCHEMA)


def _row(t: Trajectory) -> dict[str, Any]:
    prompt, response = texts(t)
    return {
        "uid": t.prompt.uid,
        "sample": t.sample,
        "status": t.status.value,
        "reward": t.reward,
        "rewards": plain_json(t.rewards),
        "prompt": prompt,
        "response": response,
        "turns": t.turns,
        "response_length": t.response_length,
        "env_class": t.prompt.env_class,
        "metadata": plain_json(t.metadata),
        "messages": t.messages,
        "steps": [_step_row(step) for step in t.steps],
        "versions": [{"version": version, "start": start} for version, start in t.versions],
        "prompt_length": t.prompt_length,
        "seconds": plain_json(t.seconds),
        "prompt_messages": t.prompt.messages,
        "extras": plain_json(t.prompt.extras),
        "tools": plain_json(t.tools),
    }


def _trajectory(row: dict[str, Any], tokens: array[int], mask: array[int], logprobs: array[float]) -> Trajectory:
    prompt = Prompt(row["uid"], row["prompt_messages"], row["env_class"], json.loads(row["extras"]))
    return Trajectory(
        prompt,
        row["sample"],
        tokens,
        mask,
        logprobs,
        prompt_length=row["prompt_length"],
        reward=row["reward"],
        rewards=json.loads(row["rewards"] or "{}"),
        status=Status(row["status"]),
        turns=row["turns"],
        versions=[(span["version"], span["start"]) for span in row["versions"]],
        messages=row["messages"],
        metadata=json.loads(row["metadata"]),
        seconds=json.loads(row["seconds"]),
        steps=[_step(step) for step in row["steps"]],
        tools=json.loads(row["tools"] or "[]"),  # absent from older files
        columns={column["name"]: _column(column) for column in row["columns"] or ()},  # absent from older files
    )


def _columns(t: Trajectory) -> list[dict[str, Any]]:
    arrays = {name: (column.values.numpy(), column.aligned) for name, column in t.columns.items()}
    return [
        {"name": name, "aligned": aligned, "dtype": str(a.dtype), "shape": a.shape, "values": a.tobytes()}
        for name, (a, aligned) in arrays.items()
    ]


def _column(row: dict[str, Any]) -> Column:
    import torch  # slow to import, and needed only for columns

    from skyrl_mega.trajectories.sequences import Column

    values = np.frombuffer(row["values"], row["dtype"]).reshape(row["shape"])
    return Column(torch.from_numpy(values.copy()), row["aligned"])


def _step_row(step: TrajectoryStep) -> dict[str, Any]:
    return {**vars(step), "kind": step.kind.value, "tool_calls": [plain_json(call) for call in step.tool_calls]}


def _step(row: dict[str, Any]) -> TrajectoryStep:
    return TrajectoryStep(
        **{**row, "kind": Kind(row["kind"]), "tool_calls": [json.loads(call) for call in row["tool_calls"]]}
    )


def texts(t: Trajectory) -> tuple[str, str]:
    """Returns two texts of the conversation: the messages of the first prompt, and all later messages.

    A text without messages is "", a text of one message is the message's content, and a text of several messages gives
    each message's role. Fetches remote messages; raises ClusterError if the messages are lost.
    """
    prompt = t.steps[0].messages if t.steps else 0
    return _text(t.messages[:prompt]), _text(t.messages[prompt:])


def _text(messages: list[dict[str, Any]]) -> str:
    """Returns the text of a single message, or of several messages with roles."""
    if len(messages) == 1:
        return messages[0]["content"]
    return "\n".join(f"[{m['role']}] {m['content']}" for m in messages)


def plain_json(value: Any) -> str:
    """Returns a value as JSON, with letters outside ASCII unchanged. Values unknown to JSON are written as
    `str(value)`, NaN and infinities as `NaN` and `Infinity`."""
    return json.dumps(value, default=str, ensure_ascii=False)
