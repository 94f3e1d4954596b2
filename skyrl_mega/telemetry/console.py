"""Console output of a run.

On a terminal each phase is a live progress line. Elsewhere, and in the run's log file, every message is a plain line.
In both cases steps are rows of an aligned table.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, TextIO

import rich.console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from skyrl_mega.common.safe_read import writing
from skyrl_mega.common.secrets import all_hidden, hidden
from skyrl_mega.common.terminal import printable
from skyrl_mega.config.command import discard_output
from skyrl_mega.telemetry import events, table
from skyrl_mega.telemetry.events import Event
from skyrl_mega.telemetry.metrics import finite

HEADER_EVERY = 20
"""Number of rows between two headers of the table of steps."""
QUIET_S = 30.0
"""Seconds between plain progress lines of a phase."""
WORTH_A_LINE_S = 5.0
"""Minimum duration in seconds of a phase that leaves a plain line."""

PLACES = (
    ("report", "report.html"),
    ("config", "config.yaml"),
    ("metrics", "metrics.jsonl"),
    ("events", events.FILE),
    ("estimate", "estimate.json"),
    ("profile", "profile"),
    ("timeline", "timeline"),
    ("tensorboard", "tensorboard"),
    ("trajectories", "trajectories"),
    ("checkpoints", "checkpoints"),
    ("model", "model"),
    ("logs", "logs"),
)
"""(Name, path in the run's folder) of the results listed in the closing summary, if they exist."""

AGENT_FIGURE = "/of/agent_"
"""Part of the names of figures about agents' requests (docs/agents.md): most count what rarely happens."""


@dataclass
class Phase:
    """A running phase of a run, such as `generate`, with its progress. Methods raise OSError if the run's log cannot be
    written."""

    name: str
    total: int | None
    """Number of items; None if unknown."""
    console: Console
    task: TaskID | None = None
    """Live progress line of the phase on a terminal."""
    start: float = field(default_factory=lambda: time.monotonic())
    done: int = 0
    """Number of finished items."""
    detail: str = ""
    """Present activity, shown after the name."""
    last_line_s: float = field(default_factory=lambda: time.monotonic())
    """Time of the last plain line."""

    def update(self, done: int) -> None:
        """Sets the number of finished items out of `total` and shows the progress."""
        self.done = done
        self.console._on_progress(self)

    def describe(self, detail: str) -> None:
        """Sets `detail`, the present activity, and shows the progress."""
        self.detail = detail
        self.console._on_progress(self)

    @property
    def seconds(self) -> float:
        """Seconds since the start of the phase."""
        return time.monotonic() - self.start


class Console:
    """Reports the progress of a run to the user. A context manager. Every method that writes to the log or to
    `events.jsonl` raises OSError if the file cannot be written.

    Args:
        out: Output stream; standard output by default.
        as_json: Prints steps and summary on `out` as JSON, one object per line, and everything else on standard error.
        ended_by: Returns the name of the signal that caused an exception; "" for a real failure.
    """

    def __init__(
        self,
        out: TextIO | None = None,
        as_json: bool = False,
        ended_by: Callable[[BaseException], str] = lambda error: "",
    ) -> None:
        self._json = out or sys.stdout if as_json else None
        self._out = rich.console.Console(
            file=sys.stderr if as_json else out or sys.stdout, highlight=False, markup=False
        )
        self._live = self._out.is_terminal
        self._progress: Progress | None = None
        self._log: TextIO | None = None
        self._events: TextIO | None = None
        self._finished_step = 0
        self._open: list[Phase] = []
        self._seen: set[str] = set()
        self._rows = 0
        self._started = time.monotonic()
        self._lock = threading.RLock()
        self._stack = ExitStack()
        self._ended_by = ended_by

    def log_to(self, path: Path) -> None:
        """Appends all further plain lines, with date and time, to the file `path`; creates its folder. Raises OSError
        if the file cannot be opened."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._log = path.open("a", buffering=1, encoding="utf-8")
        self._stack.callback(_close, self._log)

    def events_to(self, folder: Path) -> None:
        """Appends all further events to `events.jsonl` of a run's folder. Raises OSError if the file cannot be
        opened."""
        self._events = (folder / events.FILE).open("a", buffering=1)
        self._stack.callback(_close, self._events)

    @contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator[Phase]:
        """Opens a named phase of the run for the duration of the block and yields the phase.

        Prints and logs the first start of each name, progress at most every `QUIET_S` seconds, and the duration or
        failure of a phase of at least `WORTH_A_LINE_S` seconds. An exception of the block passes through.

        Args:
            name: Name of the phase.
            total: Number of items; None if unknown.
        """
        phase = Phase(name, total, self)
        self._enter(phase)
        try:
            yield phase
        except BaseException as error:
            signal = self._ended_by(error)
            self._leave(phase, f"ended by {signal} after" if signal else "failed after")
            raise
        self._leave(phase, "done in")

    def say(self, text: str) -> None:
        """Prints and logs a line; terminal control characters are escaped and secrets hidden. A closed reader of the
        output is not an error, but a log that cannot be written raises OSError.

        If `text` is an `Event`, also appends the event to `events.jsonl` and the JSON output (`record`).
        """
        shown = printable(hidden(text), keep="\n\t")
        self._print(shown)
        self._write_log(shown)
        self.record(text)

    def show_secret(self, text: str, instead: str) -> None:
        """Prints a line with a secret if the output is a terminal, else `instead`; the log always gets `instead`.

        Other people may read the log, or the file or pipe behind the output.
        """
        # rich's `is_terminal` is true for a pipe too under FORCE_COLOR or TTY_COMPATIBLE
        self._print(printable(text if self._out.file.isatty() else instead))
        self._write_log(instead)

    def note(self, text: str) -> None:
        """Writes a line, with secrets hidden, to the run's log, if `log_to` opened a log; does not print the line as
        text.

        If `text` is an `Event`, also writes the event to `events.jsonl` and to the JSON output (`record`).
        """
        self._write_log(hidden(text))
        self.record(text)

    def progress(self, text: str) -> None:
        """Logs a line of progress with secrets hidden; prints it too if the output is not a terminal.

        A terminal shows the same progress as a live line.
        """
        with self._lock:
            self._plain_line(hidden(text))

    def record(self, text: str) -> None:
        """Appends an `Event` to `events.jsonl` and the JSON output, if these are open; prints no line.

        Does nothing for text other than an `Event`. A `step` event goes only to `events.jsonl`: `step` writes the
        metrics of the step to the JSON output.
        """
        if not isinstance(text, Event):
            return
        if text.kind in ("step", "resumed"):
            self._finished_step = text.facts["step"]
        row = all_hidden(events.row(text, self._finished_step))
        if self._events:
            with self._lock, writing(Path(self._events.name)):
                self._events.write(json.dumps(row) + "\n")
        if text.kind != "step":  # the JSON output has the metrics of the step
            self._emit({"event": text.kind, **row})

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Prints, logs and records the table row of a step, with a header every `HEADER_EVERY` rows; writes all metrics
        to the JSON output."""
        if self._rows % HEADER_EVERY == 0:
            self._print(table.header(), style="bold")
            self._write_log(table.header())
        self._rows += 1
        self.say(Event("step", table.row(step, metrics), step=step))
        self._emit({"step": step, **finite(metrics)})

    def summary(self, folder: Path, before: Mapping[str, float], after: Mapping[str, float]) -> None:
        """Prints and logs the end of a run: its duration, each score before → after, and the paths of all results;
        writes the same to the JSON output. The figures of agents' requests (`…/of/agent_…`) are left out if they are 0
        before and after.

        Args:
            folder: The run's folder.
            before: Metrics of the first evaluation; a score missing here is printed without a change.
            after: Metrics of the last evaluation.
        """
        places = {name: str(folder / file) for name, file in PLACES if (folder / file).exists()}
        self.say(f"done in {table.duration(time.monotonic() - self._started)}")
        for name, value in after.items():
            if AGENT_FIGURE in name and not value and not before.get(name):
                continue
            if name in before:
                change = f"{table.number(before[name])} → {table.number(value)}  ({value - before[name]:+.3f})"
            else:
                change = table.number(value)
            self.say(f"  {name.ljust(32)} {change}")
        for name, place in places.items():
            self.say(f"  {name.ljust(12)} {place}")
        if "tensorboard" in places:
            self.say(f"  look at it: tensorboard --logdir {places['tensorboard']}")
        self._emit({"done": True, "before": dict(before), "after": dict(after), "places": places})

    def close(self) -> None:
        """Ends the live line and closes the files of `log_to` and `events_to`. Raises OSError if the rest of a file
        cannot be written."""
        self._stop_live()
        self._stack.close()
        self._log = self._events = None

    def __enter__(self) -> Console:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _enter(self, phase: Phase) -> None:
        with self._lock:
            self._open.append(phase)
            if phase.name not in self._seen:  # once per name: the log shows the run's activity without repetition
                self._seen.add(phase.name)
                self._plain_line(f"{phase.name} …")
            if self._live:
                if not self._progress:
                    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=30))
                    self._progress = Progress(
                        *columns, MofNCompleteColumn(), TimeElapsedColumn(), console=self._out, transient=True
                    )
                    self._progress.start()
                phase.task = self._progress.add_task(phase.name, total=phase.total)

    def _on_progress(self, phase: Phase) -> None:
        with self._lock:
            if self._progress and phase.task is not None:
                description = f"{phase.name}: {phase.detail}" if phase.detail else phase.name
                self._progress.update(phase.task, completed=phase.done, description=description)
            if time.monotonic() - phase.last_line_s >= QUIET_S:
                phase.last_line_s = time.monotonic()
                total = f"/{phase.total}" if phase.total else ""
                count = f" {phase.done}{total}" if phase.done or total else ""
                detail = f": {phase.detail}" if phase.detail else ""
                seconds = table.duration(phase.seconds)
                self._plain_line(f"{phase.name}{'' if detail else count}, {seconds}{detail}")

    def _leave(self, phase: Phase, how: str) -> None:
        with self._lock:
            self._open.remove(phase)
            if self._progress and phase.task is not None:
                self._progress.remove_task(phase.task)
            if not self._open:
                self._stop_live()
            if phase.seconds >= WORTH_A_LINE_S:
                self._plain_line(f"{phase.name} {how} {table.duration(phase.seconds)}")

    def _stop_live(self) -> None:
        if self._progress:
            self._progress.stop()
            self._progress = None

    def _plain_line(self, text: str) -> None:
        """Logs a line; without a live line also prints the line."""
        if not self._live:
            self._print(text)
        self._write_log(text)

    def _print(self, text: str, style: str | None = None) -> None:
        try:
            self._out.print(text, style=style, soft_wrap=True)
            self._out.file.flush()
        except BrokenPipeError:
            self._on_closed_reader(self._out.file)

    def _write_log(self, text: str) -> None:
        if self._log:
            with writing(Path(self._log.name)):
                self._log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {text}\n")

    def _emit(self, row: dict[str, object]) -> None:
        if self._json:
            try:
                print(json.dumps(row), file=self._json, flush=True)
            except BrokenPipeError:
                self._on_closed_reader(self._json)

    def _on_closed_reader(self, stream: IO[str]) -> None:
        """Handles a closed reader, as after `| head`: the run continues, and the log notes the end of printing."""
        discard_output(stream)
        self._write_log("the reader of the printed lines has closed; from here on, lines go only to this log")


def _close(log: TextIO) -> None:
    with writing(Path(log.name)):
        log.close()
