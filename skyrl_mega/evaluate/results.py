"""An evaluation's folder: saves every sample as soon as finished, so that a killed evaluation resumes with the missing
samples.

`samples/<set>.jsonl` gets a line per sample and is read by a resumed evaluation. `<set>.parquet` is created from these
lines at the end.
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

from skyrl_mega.cluster.temporary_files import partial_file
from skyrl_mega.common.errors import UserError
from skyrl_mega.common.safe_read import Malformed, parse_json, read_json, writing
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.evaluate.identity import equal_or_digest
from skyrl_mega.evaluate.sets import PromptSet, SampleTask
from skyrl_mega.telemetry.run_dir import locked
from skyrl_mega.trajectories import parquet
from skyrl_mega.trajectories.by_reference import fetch_arrays
from skyrl_mega.trajectories.trajectory import Status, Trajectory

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
        ("messages", parquet.MESSAGES),
        ("seconds", pa.string()),
        ("prompt_messages", parquet.MESSAGES),
        ("extras", pa.string()),
    ]
)
"""Columns of a sample. `uid` is the row in the set's file. `response_tokens` counts tokens of the policy, without
observations. `metrics`, `metadata`, `seconds` and `extras` are JSON."""
ROWS_AT_ONCE = 1000
"""Number of rows in a row group of the parquet file."""
MAX_BYTES = 2**24
"""Largest size in bytes of an evaluation.json."""


class ScoredSample(NamedTuple):
    """The part of a sample kept in memory."""

    reward: float
    accuracy: float
    """The first metric declared by the environment; without metrics 1 for a reward of at least 1, else 0."""
    metrics: dict[str, float]
    """The metrics declared by the environment."""
    status: Status
    tokens: int
    """Tokens written by the policy."""
    place: int
    """Byte offset of the sample's line in `samples/<set>.jsonl`."""


Key = tuple[int, int]
"""(uid, sample number)."""


def row_of(t: Trajectory, metrics: Sequence[str]) -> dict[str, Any]:
    """Returns a finished sample as a row of SCHEMA. The accuracy is the first of `metrics`; without metrics, 1 for a
    reward of at least 1 and else 0.

    Args:
        t: The sample.
        metrics: Metrics declared by the sample's environment; unreported metrics count as 0.

    Raises:
        ClusterError: Remote arrays of the sample are lost.
        TypeError, ValueError: A reported metric is no number.
    """
    t = fetch_arrays(t)
    scores = {name: float(t.metadata.get(name) or 0.0) for name in metrics}
    prompt, response = parquet.texts(t)
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
        "metadata": parquet.plain_json(t.metadata),
        "messages": t.messages,
        "seconds": parquet.plain_json(t.seconds),
        "prompt_messages": t.prompt.messages,
        "extras": parquet.plain_json(t.prompt.extras),
    }


class Results:
    """The saved samples of all sets in an evaluation's folder. Created by `open_results`, which locks the folder.

    Samples with an infrastructure failure in an earlier start count as missing, because the service may work now.

    Args:
        folder: The evaluation's folder.
        sets: The sets. Samples of other prompts are ignored.
        samples: Samples per prompt. Samples with a number from this on are ignored.

    Raises:
        UserError: A line of a file is not a sample, or a sample was generated for another prompt.
    """

    def __init__(self, folder: Path, sets: Sequence[PromptSet], samples: int) -> None:
        self.folder = folder
        self.samples: dict[str, dict[Key, ScoredSample]] = {}
        self._files: dict[str, BinaryIO] = {}
        (folder / "samples").mkdir(exist_ok=True)
        for s in sets:
            file = self._file(s.name)
            prompts = {prompt.uid: prompt for prompt in s.prompts}
            present = {
                (row["uid"], row["sample"]): _sample(row, place)
                for place, row in _read_rows(file)
                if self._belongs(s.name, row, prompts, samples)
            }
            lost = Status.ERROR_INFRASTRUCTURE  # the service may work now; later lines win
            self.samples[s.name] = {key: sample for key, sample in present.items() if sample.status is not lost}

    def missing(self, tasks: Iterator[SampleTask]) -> list[SampleTask]:
        """Returns the tasks without a saved sample, in the same order. Raises KeyError for a task of a set that was not
        opened."""
        return [task for task in tasks if (task.prompt.uid, task.sample) not in self.samples[task.set]]

    def add(self, name: str, row: dict[str, Any]) -> None:
        """Appends a sample to the set's file; from then on a crash of this process does not lose the sample. Replaces
        an earlier sample of the same prompt and number.

        Args:
            name: Name of the set.
            row: Result of `row_of`.

        Raises:
            OSError: The file cannot be written, as on a full disk.
        """
        if name not in self._files:
            self._files[name] = self._file(name).open("ab", buffering=0)
        place = self._files[name].seek(0, os.SEEK_END)
        with writing(self._file(name)):
            self._files[name].write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        self.samples[name][row["uid"], row["sample"]] = _sample(row, place)

    def write_parquet(self) -> None:
        """Writes the samples of each set to `<set>.parquet`, ordered by prompt and sample. Replaces each file
        atomically. A set whose file of samples has no valid sample gets a file without rows.

        Raises:
            OSError: A file cannot be written, or a set has no file of samples.
        """
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
        """Closes the files of samples that `add` opened; does nothing for others, and when called again."""
        for file in self._files.values():
            file.close()

    def _file(self, name: str) -> Path:
        return self.folder / "samples" / f"{name}.jsonl"

    def _belongs(self, name: str, row: Mapping[str, Any], prompts: Mapping[int, Prompt], samples: int) -> bool:
        """Returns True if a line's sample belongs to the present evaluation.

        Raises:
            UserError: The sample was drawn for another prompt.
        """
        prompt = prompts.get(row["uid"])
        if prompt is None or row["sample"] >= samples:
            return False  # from an evaluation with a larger limit or more samples
        same = (prompt.messages, prompt.env_class, parquet.plain_json(prompt.extras))
        if same != (row["prompt_messages"], row["env_class"], row["extras"]):
            raise UserError(
                f"row {prompt.uid} of the set {name} differs from the row that its saved samples were generated for",
                key="--output",
                value=self.folder,
                fix="give another --output",
            )
        return True


@contextmanager
def open_results(
    folder: Path, identity: Mapping[str, Any], sets: Sequence[PromptSet], samples: int
) -> Iterator[Results]:
    """Creates or reopens an evaluation's folder, and yields its saved samples. The folder is locked during the `with`
    block, and stays afterwards.

    Args:
        folder: The evaluation's folder.
        identity: The settings that scores depend on, written to `evaluation.json` or compared with it.
        sets: The sets.
        samples: Samples per prompt.

    Raises:
        UserError: The folder cannot be created, is in use by another process, or contains an evaluation of another
            model, with other settings or other prompts, a damaged line of samples, or files but no evaluation.
    """
    try:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"the folder cannot be created: {error.strerror}", key="--output", value=folder, fix="give another folder"
        ) from error
    with locked(folder, f"--output {folder}", "give another --output, or end that one"):
        _claim(folder, identity)
        results = Results(folder, sets, samples)
        try:
            yield results
        finally:
            results.close()


OLD_DEFAULTS: Mapping[str, Any] = {
    "rollout.conversation": "messages",
    "rollout.chat_template_options": {},
    "rollout.max_input_tokens": None,
    "environment.reward_function": None,
}
"""Values assumed for an evaluation begun before these settings existed."""


def _claim(folder: Path, identity: Mapping[str, Any]) -> None:
    file = folder / "evaluation.json"
    if file.exists():
        before = read_json(file, "give another --output", most=MAX_BYTES)
        before = {**{key: value for key, value in OLD_DEFAULTS.items() if key in identity}, **before}
        for key in [*identity, *before]:
            old, new = (json.dumps(d[key], sort_keys=True) if key in d else "nothing" for d in (before, identity))
            if old != new and not equal_or_digest(before.get(key), identity.get(key)):
                raise UserError(
                    f"it holds an evaluation with {key} = {old}, and this one has {new}",
                    key="--output",
                    value=folder,
                    fix="give another --output, or set it back",
                )
        return
    partial = folder / ".evaluation.json.partial"
    if others := {path.name for path in folder.iterdir()} - {".lock", "logs", partial.name}:
        raise UserError(
            f"the folder contains {min(others)} but no evaluation",
            key="--output",
            value=folder,
            fix="give a new or an empty folder, or one with an evaluation.json",
        )
    partial.write_text(json.dumps(identity, indent=2) + "\n")
    os.replace(partial, file)


def _read_rows(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields offset and content of every line. Removes an incomplete last line, left by a kill."""
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
    """Parses and checks a line's sample.

    Raises:
        UserError: The line is not a valid sample.
    """
    try:
        row = parse_json(line)
        pa.Table.from_pylist([row], schema=SCHEMA)
        if absent := [name for name in SCHEMA.names if not isinstance(row, dict) or row.get(name) is None]:
            raise Malformed(f"it has no {absent[0]}")
        _sample(row, place)
    except (ValueError, TypeError, AttributeError, pa.ArrowException) as error:
        raise UserError(
            f"the line is not a valid sample ({' '.join(str(error).split())})",
            key=f"{file}, at byte {place}",
            fix="truncate the file at this byte; the evaluation then generates the missing samples again",
        ) from error
    sample: dict[str, Any] = row
    return sample


def _line(lines: BinaryIO, place: int) -> dict[str, Any]:
    lines.seek(place)
    row: dict[str, Any] = json.loads(lines.readline())
    return row


def _sample(row: Mapping[str, Any], place: int) -> ScoredSample:
    metrics = json.loads(row["metrics"])
    return ScoredSample(row["reward"], row["accuracy"], metrics, Status(row["status"]), row["response_tokens"], place)
