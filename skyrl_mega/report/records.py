"""Trajectories as the report reads them: found, filtered and sorted, without their tokens until somebody looks.

A file holds more tokens than anything else. They are read only for what is shown (`tokens_of`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from skyrl_mega.config.errors import UserError
from skyrl_mega.report import rows
from skyrl_mega.rollout.trajectory import Status
from skyrl_mega.telemetry.run_dir import by_step


@dataclass(frozen=True)
class Part:
    """A prompt, a response of the policy or an observation: `rollout.trajectory.Step`, as far as the file has it."""

    kind: str
    messages: list[dict[str, Any]]
    start: int | None = None
    """Its first token's position; None where the file does not say."""
    end: int | None = None
    at_s: float | None = None
    generate_s: float | None = None
    env_s: float | None = None
    reward: float | None = None
    finish: str | None = None
    tool_calls: tuple[Any, ...] = ()

    @property
    def by_policy(self) -> bool:
        """Whether the policy wrote it."""
        return self.kind == "response"


@dataclass(frozen=True)
class Record:
    """A trajectory without its tokens, and where it stands. The fields that a trajectory has too mean the same."""

    run: str
    """The name of the run's folder, or of the file's."""
    step: int | None
    """From the file's name; None where it has none."""
    file: Path
    row: int
    """In the file."""
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
    """(weight version, position from where on the policy's tokens are drawn with it), in order."""
    metadata: dict[str, Any]
    seconds: dict[str, float]
    extras: dict[str, Any]
    """The prompt's: ground truth, where it comes from."""
    parts: list[Part]
    """What happened, in order; their messages follow one another."""

    @property
    def truncated(self) -> bool:
        """Whether a budget ended it."""
        return self.status.startswith("truncated")

    @property
    def weights(self) -> str:
        """The weight versions that its tokens were drawn with, such as `3` or `3, 4`."""
        return ", ".join(dict.fromkeys(str(version) for version, _ in self.versions)) or "–"


@dataclass(frozen=True)
class Tokens:
    """A trajectory's tokens, aligned by position."""

    ids: np.ndarray
    mask: np.ndarray
    """1 where the policy wrote the token."""
    logprobs: np.ndarray

    @cached_property
    def spans(self) -> list[tuple[int, int]]:
        """(start, end) of each run of the policy's tokens."""
        edges = np.flatnonzero(np.diff(self.mask, prepend=0, append=0))
        return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


@dataclass(frozen=True)
class Query:
    """Which trajectories somebody wants to see."""

    steps: tuple[float, float] | None = None
    statuses: frozenset[str] = frozenset()
    """Empty takes all."""
    reward: tuple[float, float] | None = None
    text: str = ""
    """In any message or in what the environment said of it, in any case."""

    def takes(self, record: Record) -> bool:
        """Whether a trajectory is wanted."""
        if self.statuses and record.status not in self.statuses:
            return False
        if self.reward and not self.reward[0] <= record.reward <= self.reward[1]:
            return False
        return not self.text or self._found(record)

    def takes_step(self, step: int | None) -> bool:
        """Whether the file of a step is wanted at all."""
        return self.steps is None or (step is not None and self.steps[0] <= step <= self.steps[1])

    def _found(self, record: Record) -> bool:
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
"""What trajectories can be sorted by; a `-` before it turns the order around."""


def files_of(paths: Sequence[Path]) -> list[tuple[str, Path]]:
    """Trajectory files with the name of their run, in order, of run folders, `trajectories/` folders and files.

    Raises:
        UserError: A path is absent, or holds no trajectories.
    """
    found: list[tuple[str, Path]] = []
    for path in paths:
        if path.is_file():
            inside = path.parent.name == "trajectories"
            found.append((path.absolute().parent.parent.name if inside else path.stem, path))
            continue
        if not path.is_dir():
            allowed = "a run's folder, such as runs/<name>, or a file of its trajectories/"
            raise UserError(f"{path}: no such file or folder; allowed: {allowed}")
        folder = path / "trajectories" if (path / "trajectories").is_dir() else path
        files = list(by_step(folder, ".parquet").values()) or sorted(folder.glob("*.parquet"))
        if not files:
            hint = "the run has written none yet, or has telemetry.trajectories_every=0"
            raise UserError(f"{path}: no trajectories/*.parquet there; {hint}")
        run = folder.absolute().parent.name if folder.name == "trajectories" else folder.absolute().name
        sets = (folder / "evaluation.json").is_file()  # an evaluation: a file is a set
        found += [(file.stem if sets else run, file) for file in files]
    return list(dict.fromkeys(found))


def step_of(file: Path) -> int | None:
    """The step that a file's name says; a set's name may end in a number too (`aime24`)."""
    number = re.search(r"(?:^|step_?)(\d+)$", file.stem)
    return int(number[1]) if number else None


def load(
    files: Sequence[tuple[str, Path]], query: Query, progress: Callable[[int], None] = lambda _: None
) -> list[Record]:
    """The wanted trajectories of all files, in their order there.

    Raises:
        UserError: A file is not one of trajectories, or none is of a wanted step.
    """
    wanted = [(run, file, step_of(file)) for run, file in files if query.takes_step(step_of(file))]
    if not wanted:
        steps = [step for _, file in files if (step := step_of(file)) is not None]
        kept = f"there are steps {min(steps)} to {max(steps)}" if steps else "no file's name ends in a step"
        raise UserError(f"--step: no file of that step; {kept}")
    found: list[Record] = []
    for done, (run, file, step) in enumerate(wanted, start=1):
        found += filter(query.takes, _records(run, step, file))
        progress(done)
    return found


def tokens_of(records: Sequence[Record]) -> Iterator[Tokens]:
    """The tokens of some trajectories, in their order, none for an evaluation's samples; each file is read once for
    neighbours of the same file."""
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
    """Statuses that the words name; `truncated` is every status that begins so.

    Raises:
        UserError: A word names none.
    """
    every = [status.value for status in Status]
    for word in words:
        if not any(status.startswith(word) for status in every):
            raise UserError(f"--status {word}: allowed: {', '.join(every)}, or how some of them begin")
    return frozenset(status for status in every if any(status.startswith(word) for word in words))


def _records(run: str, step: int | None, file: Path) -> Iterator[Record]:
    for i, row in enumerate(rows.read(file)):
        yield Record(
            run=run,
            step=step,
            file=file,
            row=i,
            uid=row["uid"],
            sample=row["sample"],
            status=row["status"],
            reward=row["reward"],
            turns=row["turns"],
            prompt_length=row["prompt_length"],
            response_length=row["response_length"],
            env_class=row["env_class"],
            messages=row["messages"],
            versions=[(span["version"], span["start"]) for span in row["versions"]],
            metadata=row["metadata"],
            seconds=row["seconds"],
            extras=row["extras"],
            parts=_stored_parts(row) or _guessed_parts(row),
        )


def _stored_parts(row: dict[str, Any]) -> list[Part]:
    parts, at = [], 0
    for step in row.get("steps") or []:
        messages = row["messages"][at : at + step["messages"]]
        at += step["messages"]
        parts.append(Part(**{**step, "messages": messages}))
    return parts


def _guessed_parts(row: dict[str, Any]) -> list[Part]:
    """Of a file without steps: the last assistants are the policy's, as many as there are turns."""
    said = [i for i, m in enumerate(row["messages"]) if m["role"] == "assistant"]
    turns = said[len(said) - min(row["turns"], len(said)) :]
    edges = [0, *(edge for turn in turns for edge in (turn, turn + 1)), len(row["messages"])]
    parts = []
    for i, (a, b) in enumerate(pairwise(edges)):
        kind = "response" if i % 2 else "observation" if i else "prompt"
        if a < b:
            parts.append(Part(kind, row["messages"][a:b]))
    return parts
