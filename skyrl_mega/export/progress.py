"""The progress of an export: a live line on a terminal, otherwise a plain line from time to time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TextIO

import rich.console
import rich.progress as bars

QUIET_S = 10.0
"""Seconds between plain lines."""


@dataclass
class ExportPhase:
    """A phase of an export, with the amount of work in bytes."""

    name: str
    total: int
    """All work of the phase, in bytes."""
    console: rich.console.Console | None
    """Receiver of plain lines; None prints nothing."""
    bar: bars.Progress | None = None
    """The live line on a terminal; None prints plain lines."""
    done: int = 0
    """Finished work."""
    start: float = field(default_factory=time.monotonic)
    """Start of the phase, in seconds of the monotonic clock."""
    last_print: float = field(default_factory=time.monotonic)
    """Time of the last plain line, in seconds of the monotonic clock."""

    def advance(self, amount: int) -> None:
        """Adds an amount of finished work; updates the live line, or prints a plain line every `QUIET_S` seconds."""
        self.done += amount
        if self.bar:
            self.bar.update(self.bar.task_ids[0], completed=self.done)
        elif self.console and time.monotonic() - self.last_print >= QUIET_S:
            self.last_print = time.monotonic()
            self.console.print(self.line())

    def line(self) -> str:
        """Returns the phase's name, the finished and the total amount, and the mean rate, as text."""
        seconds = max(time.monotonic() - self.start, 1e-6)
        return f"{self.name}: {size(self.done)} of {size(self.total)}, {size(self.done / seconds)}/s"


class Progress:
    """The progress of an export, printed to `out`; None prints nothing."""

    def __init__(self, out: TextIO | None) -> None:
        self._console = rich.console.Console(file=out, highlight=False, markup=False, soft_wrap=True) if out else None

    @contextmanager
    def phase(self, name: str, total: int) -> Iterator[ExportPhase]:
        """Yields a phase to be advanced within the `with`, and prints a line (`ExportPhase.line`) at the end, unless
        the block raises.

        Args:
            name: Name of the phase, such as `write`.
            total: All work of the phase, in bytes.
        """
        phase = ExportPhase(name, total, self._console)
        if self._console and self._console.is_terminal:
            figures = bars.DownloadColumn(), bars.TransferSpeedColumn(), bars.TimeRemainingColumn()
            columns = bars.TextColumn("{task.description}"), bars.BarColumn(bar_width=30), *figures
            with bars.Progress(*columns, console=self._console, transient=True) as phase.bar:
                phase.bar.add_task(name, total=total)
                yield phase
        else:
            yield phase
        if self._console:
            self._console.print(phase.line())


def size(count: float) -> str:
    """Returns `count` bytes as text with a decimal unit from B to GB; a GB is 10⁹ bytes."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
