"""Timelines of a run's steps: reading from the folder, and output as text. `timeline_trace` writes a trace for
Perfetto."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from skyrl_mega.common import safe_read
from skyrl_mega.common.errors import UserError
from skyrl_mega.telemetry.concurrency_series import Floats
from skyrl_mega.telemetry.step_timeline import FOLDER, POLICY, StepTimeline, loads
from skyrl_mega.telemetry.table import duration

NAME = re.compile(r"step_(\d+)\.json\.gz")
NEWEST = 3
"""Number of newest steps shown by default."""
COLUMNS = 72
"""Characters of a step as text."""
BLOCKS = " ▁▂▃▄▅▆▇█"


def read(run: Path, steps: tuple[float, float] | None = None, last: float = math.inf) -> list[StepTimeline]:
    """Reads and returns the timelines of a run's steps, in order; empty without timelines.

    Args:
        run: Folder of the run.
        steps: First and last wanted step, both included; None means the newest `NEWEST` steps up to `last`.
        last: Last valid step: later files are left from before a resume.

    Raises:
        UserError: A file cannot be read or is not a timeline.
    """
    files = _files(run)
    low, high = steps or (0, math.inf)
    wanted = [step for step in sorted(files) if low <= step <= min(high, last)]
    return [_read(files[step]) for step in (wanted if steps else wanted[-NEWEST:])]


def wanted(run: Path, steps: tuple[float, float] | None) -> list[StepTimeline]:
    """Reads and returns the timelines of the requested steps; like `read`, but raises if there are none.

    Args:
        run: Folder of the run.
        steps: First and last wanted step, both included; None means the newest `NEWEST` steps.

    Raises:
        UserError: None of the steps has a timeline, or a file cannot be read.
    """
    timelines = read(run, steps)
    if not timelines:
        what = "no such step" if _files(run) else "no step"
        raise UserError(
            f"{what} has a timeline there",
            key=run,
            fix=f"give the folder of a run with telemetry.timeline=true, and of its steps some in {run / FOLDER}",
        )
    return timelines


def as_text(steps: Sequence[StepTimeline]) -> Iterator[str]:
    """Yields lines for a terminal: for each step the idle shares, and rows with the activity over time.

    The rows are driver, policy, engines and environments, with `COLUMNS` characters. The last line explains the letters
    of phases.
    """
    letters = _letters(steps)
    for step in steps:
        idle = {name.removeprefix("idle/"): f"{share:.0%}" for name, share in step.idle().items()}
        shares = ", ".join(f"{name} {share}" for name, share in idle.items() if name != "bottleneck")
        yield f"step {step.step}  {duration(step.end - step.start)}  idle: {shares}"
        edges = np.linspace(step.start, step.end, COLUMNS + 1)
        phases_by_column = [_phase_at(step, (a + b) / 2) for a, b in pairwise(edges)]
        engines = np.mean([engine.at(edges).shares for engine in step.present], axis=0)
        calls = step.environments.at(edges).counts
        yield f"  driver        {''.join(letters.get(name, '·') for name in phases_by_column)}"
        yield f"  policy        {''.join('█' if name in POLICY else ' ' for name in phases_by_column).rstrip()}"
        yield f"  engines       {_bars(engines)}"
        yield f"  environments  {_bars(calls / max(1.0, calls.max()))}"
    yield "  ".join(f"{letter} {name}" for name, letter in letters.items())


def _files(run: Path) -> dict[int, Path]:
    """Returns step → file."""
    return {int(name[1]): file for file in (run / FOLDER).glob("*") if (name := NAME.fullmatch(file.name))}


def _read(file: Path) -> StepTimeline:
    fix = "remove it: the report then does without"
    try:
        return loads(safe_read.read(file, fix))
    except safe_read.Malformed as error:
        raise UserError(error, key=file, fix=fix) from error


def _letters(steps: Sequence[StepTimeline]) -> Mapping[str, str]:
    """Returns a letter for each phase: the first unused letter of the name."""
    letters: dict[str, str] = {}
    for name in dict.fromkeys(span.name for step in steps for span in step.phases):
        free = [letter for letter in f"{name}*" if letter not in letters.values()]
        letters[name] = free[0] if free else "*"
    return letters


def _phase_at(step: StepTimeline, at: float) -> str:
    return next((span.name for span in step.phases if span.start <= at < span.end), "")


def _bars(shares: Floats) -> str:
    """Returns a block character per share: empty for 0, visible for any larger share."""
    return "".join(BLOCKS[math.ceil(min(1.0, share) * (len(BLOCKS) - 1) - 1e-9)] for share in shares).rstrip()
