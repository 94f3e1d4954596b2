"""Trajectories as read by the report: found, filtered and sorted, without tokens.

Tokens are the largest part of a file. They are read only for trajectories on display (`tokens_of`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from skyrl_mega.common.errors import UserError
from skyrl_mega.envs.truths import spec_of
from skyrl_mega.report import rows
from skyrl_mega.telemetry.run_dir import by_step
from skyrl_mega.trajectories.trajectory import Status


@dataclass(frozen=True)
class Part:
    """A prompt, a response of the policy or an observation, as stored in the file (`TrajectoryStep` in
    trajectories/trajectory.py). None stands for a value not stored."""

    kind: str
    """`prompt`, `response` or `observation`."""
    messages: list[dict[str, Any]]
    """Messages of this part, each with `role` and `content`."""
    start: int | None = None
    """Position of the first token in the trajectory."""
    end: int | None = None
    """Position after the last token."""
    at_s: float | None = None
    """Start of this part, in seconds since the start of the trajectory."""
    generate_s: float | None = None
    """Seconds until the response was complete, including the wait for an engine."""
    env_s: float | None = None
    """Seconds in the environment, for this part."""
    reward: float | None = None
    """Reward of a response."""
    finish: str | None = None
    """Reason for the end of a response: `stop`, `length` or `timeout`."""
    tool_calls: tuple[Any, ...] = ()
    """Tool calls in a response, as parsed."""

    @property
    def by_policy(self) -> bool:
        """True if the policy wrote this part."""
        return self.kind == "response"


@dataclass(frozen=True)
class Record:
    """A trajectory without tokens, and its place in a file. Fields shared with `Trajectory` mean the same."""

    run: str
    """Name of the run's folder, or of the file."""
    step: int | None
    """RL step in the file's name; None if the name has no step."""
    file: Path
    row: int
    """Row number in the file."""
    uid: int
    sample: int
    status: str
    reward: float
    turns: int
    prompt_length: int
    response_length: int
    env_class: str
    messages: list[dict[str, Any]]
    versions: list[tuple[int, int]]
    """(weight version, first position sampled from this version), in order."""
    metadata: dict[str, Any]
    seconds: dict[str, float]
    extras: dict[str, Any]
    """Extra fields of the prompt, such as ground truth and source."""
    tools: list[dict[str, Any]]
    """The tools in the prompt, in the format of chat templates."""
    parts: list[Part]
    """Parts in chronological order, with consecutive messages."""

    @property
    def truncated(self) -> bool:
        """True if a limit on tokens, turns or time ended the trajectory."""
        return self.status.startswith("truncated")

    @property
    def failed(self) -> bool:
        """True if the environment, or a service under the environment, failed."""
        return Status(self.status).failed

    @property
    def error(self) -> str:
        """Error text of a failed trajectory, with its place, and of closing the environment; empty without an error."""
        error, at = (self.metadata.get(name) if self.failed else None for name in ("error", "at"))
        failure = f"{error} (at {at})" if error and at else error
        closing = self.metadata.get("close_error")
        return "\n".join(str(text) for text in (failure, f"close: {closing}" if closing else None) if text)

    @property
    def truth(self) -> Any:
        """Ground truth in the prompt's row; None if the row has none."""
        return spec_of(self.extras)[1].get("ground_truth")

    @property
    def weights(self) -> str:
        """Weight versions that sampled the tokens, as text such as `3` or `3, 4`; `–` if unknown."""
        return ", ".join(dict.fromkeys(str(version) for version, _ in self.versions)) or "–"


_AS_STORED = tuple(f.name for f in fields(Record) if f.name not in ("run", "step", "file", "row", "versions", "parts"))
"""Fields of a record that are columns of the file."""


@dataclass(frozen=True)
class Tokens:
    """A trajectory's tokens and their values, each array of shape [T]."""

    ids: np.ndarray
    """Token ids."""
    mask: np.ndarray
    """1 for tokens of the policy, else 0."""
    logprobs: np.ndarray
    """Log-probs by the engine, in nats; meaningful where `mask` is 1, NaN if unknown."""

    @cached_property
    def spans(self) -> list[tuple[int, int]]:
        """(start, end) of each uninterrupted sequence of the policy's tokens; `end` is exclusive."""
        edges = np.flatnonzero(np.diff(self.mask, prepend=0, append=0))
        return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


@dataclass(frozen=True)
class Query:
    """A filter for trajectories; all conditions must hold."""

    steps: tuple[float, float] | None = None
    """First and last wanted step, both included; None accepts all."""
    statuses: frozenset[str] = frozenset()
    """Wanted statuses; empty accepts all."""
    reward: tuple[float, float] | None = None
    """Lowest and highest wanted reward, both included; None accepts all."""
    text: str = ""
    """Text in any message or in the environment's metadata, case-insensitive."""
    error: str = ""
    """Text in the error of a failed trajectory, case-insensitive."""

    def takes(self, record: Record) -> bool:
        """Returns True if status, reward, error and text all match the filter, and for an empty filter; `takes_step`
        checks the step."""
        if self.statuses and record.status not in self.statuses:
            return False
        if self.reward and not self.reward[0] <= record.reward <= self.reward[1]:
            return False
        if self.error and self.error.casefold() not in record.error.casefold():
            return False
        return not self.text or self._contains_text(record)

    def takes_step(self, step: int | None) -> bool:
        """Returns True if files of this step are wanted; a file without a step (None) only without a limit on steps."""
        return self.steps is None or (step is not None and self.steps[0] <= step <= self.steps[1])

    def _contains_text(self, record: Record) -> bool:
        wanted = self.text.casefold()
        texts = (*(m["content"] for m in record.messages), json.dumps(record.metadata, ensure_ascii=False))
        return any(wanted in text.casefold() for text in texts)


SORTS: dict[str, Callable[[Record], Any]] = {
    "step": lambda r: (r.run, -1 if r.step is None else r.step, r.row),
    "reward": lambda r: r.reward,
    "tokens": lambda r: r.response_length,
    "turns": lambda r: r.turns,
    "seconds": lambda r: sum(r.seconds.values()),
    "prompt": lambda r: (r.uid, r.step or 0, r.sample),
}
"""Sort keys of trajectories; a leading `-` reverses the order."""


def files_of(paths: Sequence[Path]) -> list[tuple[str, Path]]:
    """Returns (run name, file) for each trajectory file in the given run folders, `trajectories/` folders, folders of
    evaluations and files, in the order of `paths`, each once. Reads no file.

    A folder's files are those named by step, in order of steps; if there are none, all `.parquet` files, by name. In
    place of the run's name stands the data set's for a folder of an evaluation, and the file's own name without its
    ending for a file given outside of `trajectories/`.

    Raises:
        UserError: A path is absent, or a folder has no `.parquet` file.
    """
    collected: list[tuple[str, Path]] = []
    for path in paths:
        if path.is_file():
            inside = path.parent.name == "trajectories"
            collected.append((path.absolute().parent.parent.name if inside else path.stem, path))
            continue
        if not path.is_dir():
            allowed = "a run's folder, such as runs/<name>, or a file of its trajectories/"
            raise UserError(f"no such file or folder; allowed: {allowed}", key=path)
        folder = path / "trajectories" if (path / "trajectories").is_dir() else path
        files = list(by_step(folder, ".parquet").values()) or sorted(folder.glob("*.parquet"))
        if not files:
            hint = "the run has written none yet, or has telemetry.trajectories_every=0"
            raise UserError("no trajectories/*.parquet there", key=path, fix=hint)
        run = folder.absolute().parent.name if folder.name == "trajectories" else folder.absolute().name
        sets = (folder / "evaluation.json").is_file()  # an evaluation: a file per data set
        collected += [(file.stem if sets else run, file) for file in files]
    return list(dict.fromkeys(collected))


def step_of(file: Path) -> int | None:
    """Returns the step in a file's name, as in `step_000010.parquet` or `10.parquet`; None for other names.

    The name of a data set may end with a number too (`aime24`), and gives None.
    """
    number = re.search(r"(?:^|step_?)(\d+)$", file.stem)
    return int(number[1]) if number else None


def load(
    files: Sequence[tuple[str, Path]], query: Query, progress: Callable[[int], None] = lambda _: None
) -> list[Record]:
    """Reads files and returns the trajectories accepted by a filter, in file order.

    Args:
        files: (run name, file) pairs, from `files_of`.
        query: The filter.
        progress: Called with the number of files read so far. Files of other steps are neither read nor counted.

    Raises:
        UserError: A file does not contain trajectories, or no file belongs to a wanted step, as with empty `files`.
    """
    wanted = [(run, file, step_of(file)) for run, file in files if query.takes_step(step_of(file))]
    if not wanted:
        steps = [step for _, file in files if (step := step_of(file)) is not None]
        kept = f"there are steps {min(steps)} to {max(steps)}" if steps else "no file's name ends in a step"
        raise UserError("no file of that step", key="--step", fix=kept)
    collected: list[Record] = []
    for done, (run, file, step) in enumerate(wanted, start=1):
        collected += filter(query.takes, _records(run, step, file))
        progress(done)
    return collected


def tokens_of(records: Sequence[Record]) -> Iterator[Tokens]:
    """Reads and yields the tokens of each trajectory, in order; empty arrays for samples of an evaluation, whose files
    contain no tokens.

    A file is read once for consecutive records of the same file.

    Raises:
        UserError: A file cannot be read; raised when its first trajectory is due.
    """
    open_file, table = None, None
    for record in records:
        if record.file != open_file:
            open_file, table = record.file, rows.tokens(record.file)
        if table is None:
            yield Tokens(np.zeros(0, np.int32), np.zeros(0, np.int8), np.zeros(0, np.float32))
            continue
        ids, mask, logprobs = (table[name][record.row].values for name in rows.TOKENS)
        yield Tokens(*(values.to_numpy(zero_copy_only=False) for values in (ids, mask, logprobs)))


def statuses(words: Sequence[str]) -> frozenset[str]:
    """Returns all statuses that begin with one of the words: `truncated` stands for every kind of truncation. Empty
    without words.

    Raises:
        UserError: A word matches no status.
    """
    every = [status.value for status in Status]
    for word in words:
        if not any(status.startswith(word) for status in every):
            raise UserError(
                f"allowed: {', '.join(every)}, or the first letters of some of them", key="--status", value=word
            )
    return frozenset(status for status in every if any(status.startswith(word) for word in words))


def _records(run: str, step: int | None, file: Path) -> Iterator[Record]:
    for i, row in enumerate(rows.read(file)):
        versions = [(span["version"], span["start"]) for span in row["versions"]]
        read = {name: row[name] for name in _AS_STORED}
        parts = _stored_parts(row) or _guessed_parts(row)
        yield Record(run=run, step=step, file=file, row=i, versions=versions, parts=parts, **read)


def _stored_parts(row: dict[str, Any]) -> list[Part]:
    parts, at = [], 0
    for step in row.get("steps") or []:
        messages = row["messages"][at : at + step["messages"]]
        at += step["messages"]
        parts.append(Part(**{**step, "messages": messages}))
    return parts


def _guessed_parts(row: dict[str, Any]) -> list[Part]:
    """Returns the parts for a file without steps: the last assistant messages belong to the policy, as many as there
    are turns."""
    assistant_places = [i for i, m in enumerate(row["messages"]) if m["role"] == "assistant"]
    turns = assistant_places[len(assistant_places) - min(row["turns"], len(assistant_places)) :]
    edges = [0, *(edge for turn in turns for edge in (turn, turn + 1)), len(row["messages"])]
    parts = []
    for i, (a, b) in enumerate(pairwise(edges)):
        kind = "response" if i % 2 else "observation" if i else "prompt"
        if a < b:
            parts.append(Part(kind, row["messages"][a:b]))
    return parts
