"""An evaluation's folder: every sample as it ends, so that a killed evaluation goes on with those that are missing.

`samples/<set>.jsonl` takes a line for each sample. It is what a resumed evaluation reads; `<set>.parquet` is made from
it at the end.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from skyrl_mega.cluster.leftovers import partial_file
from skyrl_mega.config.errors import UserError
from skyrl_mega.config.safe_read import Malformed, parse_json, read_json, writing
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.evaluate.identity import alike
from skyrl_mega.evaluate.sets import Draw, PromptSet
from skyrl_mega.rollout import trajectory_io
from skyrl_mega.rollout.by_reference import fetch_arrays
from skyrl_mega.rollout.trajectory import Status, Trajectory
from skyrl_mega.telemetry.run_dir import locked

SCHEMA = pa.schema(
    [
        ("uid", pa.int64()),
        ("sample", pa.int32()),
        ("status", pa.string()),
        ("reward", pa.float64()),
        ("accuracy", pa.float64()),
        ("metrics", pa.string()),
        ("prompt", pa.string()),
        ("response", pa.string()),
        ("turns", pa.int32()),
        ("prompt_tokens", pa.int32()),
        ("response_tokens", pa.int32()),
        ("env_class", pa.string()),
        ("data_source", pa.string()),
        ("metadata", pa.string()),
        ("messages", trajectory_io.MESSAGES),
        ("seconds", pa.string()),
        ("prompt_messages", trajectory_io.MESSAGES),
        ("extras", pa.string()),
    ]
)
"""`uid` is the row in the set's file. `response_tokens` counts what the policy wrote, without observations. `metrics`,
`metadata`, `seconds` and `extras` are JSON."""
ROWS_AT_ONCE = 1000
LARGEST = 2**24
"""Bytes of an evaluation.json."""


class Sample(NamedTuple):
    """What of a sample is kept in memory."""

    reward: float
    accuracy: float
    metrics: dict[str, float]
    status: Status
    tokens: int
    """That the policy wrote."""
    place: int
    """Byte of its line."""


Key = tuple[int, int]
"""uid, sample."""


def row_of(t: Trajectory, metrics: Sequence[str]) -> dict[str, Any]:
    """A finished sample as a row of SCHEMA.

    Args:
        t: The sample.
        metrics: Those that its environment declares; one that it did not report counts as 0.
    """
    t = fetch_arrays(t)
    scores = {name: float(t.metadata.get(name) or 0.0) for name in metrics}
    prompt, response = trajectory_io.texts(t)
    return {
        "uid": t.prompt.uid,
        "sample": t.sample,
        "status": t.status.value,
        "reward": t.reward,
        "accuracy": scores[metrics[0]] if metrics else float(t.reward >= 1),
        "metrics": json.dumps(scores),
        "prompt": prompt,
        "response": response,
        "turns": t.turns,
        "prompt_tokens": t.prompt_length,
        "response_tokens": sum(t.mask),
        "env_class": t.prompt.env_class,
        "data_source": str(t.prompt.extras.get("data_source") or ""),
        "metadata": trajectory_io.plain_json(t.metadata),
        "messages": t.messages,
        "seconds": trajectory_io.plain_json(t.seconds),
        "prompt_messages": t.prompt.messages,
        "extras": trajectory_io.plain_json(t.prompt.extras),
    }


class Results:
    """The samples of all sets that are there, but for those that an earlier start lost to the infrastructure. Made by
    `opened`."""

    def __init__(self, folder: Path, sets: Sequence[PromptSet], samples: int) -> None:
        self.folder = folder
        self.samples: dict[str, dict[Key, Sample]] = {}
        self._files: dict[str, BinaryIO] = {}
        (folder / "samples").mkdir(exist_ok=True)
        for s in sets:
            file = self._file(s.name)
            prompts = {prompt.uid: prompt for prompt in s.prompts}
            there = {
                (row["uid"], row["sample"]): _sample(row, place)
                for place, row in _rows(file)
                if self._asked(s.name, row, prompts, samples)
            }
            again = Status.ERROR_INFRASTRUCTURE  # its service may be well now; a later line stands over an earlier one
            self.samples[s.name] = {key: one for key, one in there.items() if one.status is not again}

    def missing(self, draws: Iterator[Draw]) -> list[Draw]:
        """Those of which there is no sample."""
        return [d for d in draws if (d.prompt.uid, d.sample) not in self.samples[d.set]]

    def add(self, name: str, row: dict[str, Any]) -> None:
        """Keeps a sample; when this returns, it survives this process."""
        if name not in self._files:
            self._files[name] = self._file(name).open("ab", buffering=0)
        place = self._files[name].seek(0, os.SEEK_END)
        with writing(self._file(name)):
            self._files[name].write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        self.samples[name][row["uid"], row["sample"]] = _sample(row, place)

    def write_parquet(self) -> None:
        """`<set>.parquet`, in the order of the prompts; each appears whole or not at all."""
        for name, samples in self.samples.items():
            file = self.folder / f"{name}.parquet"
            with partial_file(file) as partial:
                with self._file(name).open("rb") as lines, pq.ParquetWriter(partial, SCHEMA, compression="zstd") as out:
                    keys = sorted(samples)
                    for start in range(0, len(keys), ROWS_AT_ONCE):
                        rows = [_line(lines, samples[key].place) for key in keys[start : start + ROWS_AT_ONCE]]
                        out.write_table(pa.Table.from_pylist(rows, schema=SCHEMA))
                os.replace(partial, file)

    def close(self) -> None:
        """Closes the files."""
        for file in self._files.values():
            file.close()

    def _file(self, name: str) -> Path:
        return self.folder / "samples" / f"{name}.jsonl"

    def _asked(self, name: str, row: Mapping[str, Any], prompts: Mapping[int, Prompt], samples: int) -> bool:
        """Whether a line's sample is one of those that are asked for now.

        Raises:
            UserError: It was drawn for another prompt.
        """
        prompt = prompts.get(row["uid"])
        if prompt is None or row["sample"] >= samples:
            return False  # of a larger limit, or of more samples
        same = (prompt.messages, prompt.env_class, trajectory_io.plain_json(prompt.extras))
        if same != (row["prompt_messages"], row["env_class"], row["extras"]):
            raise UserError(
                f"--output {self.folder}: row {prompt.uid} of the set {name} was another one when its samples were "
                "drawn; give another --output"
            )
        return True


@contextmanager
def opened(folder: Path, identity: Mapping[str, Any], sets: Sequence[PromptSet], samples: int) -> Iterator[Results]:
    """The folder, ours until the context ends, with what an earlier evaluation of the same identity left in it.

    Raises:
        UserError: It cannot be made, somebody else is at work in it, or it holds an evaluation of another model or with
            other settings.
    """
    try:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output {folder}: it cannot be made: {error.strerror}; give another folder") from error
    with locked(folder, f"--output {folder}", "give another --output, or end that one"):
        _claim(folder, identity)
        results = Results(folder, sets, samples)
        try:
            yield results
        finally:
            results.close()


SINCE: Mapping[str, Any] = {
    "rollout.conversation": "messages",
    "rollout.chat_template_options": {},
    "rollout.max_input_tokens": None,
}
"""What an evaluation had that was begun before there were these settings."""


def _claim(folder: Path, identity: Mapping[str, Any]) -> None:
    file = folder / "evaluation.json"
    if file.exists():
        before = read_json(file, "give another --output", most=LARGEST)
        before = {**{key: value for key, value in SINCE.items() if key in identity}, **before}
        for key in [*identity, *before]:
            old, new = (json.dumps(d[key], sort_keys=True) if key in d else "nothing" for d in (before, identity))
            if old != new and not alike(before.get(key), identity.get(key)):
                raise UserError(
                    f"--output {folder}: it holds an evaluation with {key} = {old}, and this one has {new}; "
                    "give another --output, or set it back"
                )
        return
    partial = folder / ".evaluation.json.partial"
    if others := {path.name for path in folder.iterdir()} - {".lock", "logs", partial.name}:
        raise UserError(
            f"--output {folder}: it holds {min(others)} and no evaluation; give a new or an empty folder, or one with "
            "an evaluation.json"
        )
    partial.write_text(json.dumps(identity, indent=2) + "\n")
    os.replace(partial, file)


def _rows(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Every line's place and content. Half a last line, which a kill may leave, is cut off."""
    if not file.exists():
        return
    place = 0
    with file.open("rb+") as lines:
        for line in lines:
            if not line.endswith(b"\n"):
                lines.truncate(place)
                return
            yield place, _checked(file, place, line)
            place += len(line)


def _checked(file: Path, place: int, line: bytes) -> dict[str, Any]:
    """A line's sample.

    Raises:
        UserError: It is none.
    """
    try:
        row = parse_json(line)
        pa.Table.from_pylist([row], schema=SCHEMA)
        if absent := [name for name in SCHEMA.names if not isinstance(row, dict) or row.get(name) is None]:
            raise Malformed(f"it has no {absent[0]}")
        _sample(row, place)
    except (ValueError, TypeError, AttributeError, pa.ArrowException) as error:
        raise UserError(
            f"{file}, at byte {place}: it is no sample ({' '.join(str(error).split())}); cut the file off there, and "
            "what is missing is drawn again"
        ) from error
    found: dict[str, Any] = row
    return found


def _line(lines: BinaryIO, place: int) -> dict[str, Any]:
    lines.seek(place)
    row: dict[str, Any] = json.loads(lines.readline())
    return row


def _sample(row: Mapping[str, Any], place: int) -> Sample:
    metrics = json.loads(row["metrics"])
    return Sample(row["reward"], row["accuracy"], metrics, Status(row["status"]), row["response_tokens"], place)
