"""Stages of a start: the activity of each group of actors, and the seconds so far.

A start of minutes is not silent: `Stages` feeds the live line of the terminal, writes a plain line for a long stage,
and records `stage` and `stage_done` events.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from skyrl_mega.telemetry import table
from skyrl_mega.telemetry.console import WORTH_A_LINE_S, Console, Phase
from skyrl_mega.telemetry.events import Event

EVERY_S = 1.0
"""Seconds between updates of the live line."""
NAMED = 2
"""Number of actors named as not ready."""


@dataclass
class Stage:
    """A stage under way."""

    actors: str
    """Name of the group of actors."""
    name: str
    count: int
    """Number of actors."""
    start: float
    """Start by `time.monotonic`, in seconds."""
    waiting: tuple[str, ...] = ()
    """Names of the actors not ready."""
    counted: bool = False
    """True once `waiting` is known."""

    def wait_for(self, actors: Sequence[str]) -> None:
        """Sets the names of the actors that are not ready yet."""
        self.waiting, self.counted = tuple(actors), True

    def text(self) -> str:
        """Returns the stage as text, such as `engine: load the model 3/4 for 45.0 s (engine-2)`."""
        ready = f" {self.count - len(self.waiting)}/{self.count}" if self.counted else ""
        named = ", ".join(self.waiting[:NAMED]) + (" …" if len(self.waiting) > NAMED else "")
        names = f" ({named})" if ready and len(self.waiting) < self.count else ""
        return f"{self.actors}: {self.name}{ready} for {table.duration(time.monotonic() - self.start)}{names}"


class Stages:
    """The stages of a start. Groups of actors may be in different stages at the same time, in threads of their own.
    Raises OSError if the log or `events.jsonl` of the console cannot be written.

    Args:
        console: Prints and records the stages; None keeps the stages silent.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console
        self._open: list[Stage] = []
        self._lock = threading.Lock()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Opens a stage of the driver: a phase of the console whose live line shows all open stages of actors.

        Records the events `stage` and, if the block succeeds, `stage_done`. Does nothing without a console.
        """
        if self._console is None:
            yield
            return
        ended = threading.Event()
        with self._console.phase(name) as phase, self._recorded("driver", name, 0):
            ticker = threading.Thread(target=self._tick, args=(phase, ended), name="stages", daemon=True)
            ticker.start()
            try:
                yield
            finally:
                ended.set()
                ticker.join()

    @contextmanager
    def stage(self, actors: str, name: str, count: int) -> Iterator[Callable[[Sequence[str]], None]]:
        """Opens a stage of a group of actors; yields a function that takes the names of the actors not ready yet.

        Records the events `stage` and, if the block succeeds, `stage_done`; a long stage also prints a line at its end.

        Args:
            actors: Name of the group.
            name: The activity.
            count: Number of actors.
        """
        stage = Stage(actors, name, count, time.monotonic())
        with self._recorded(actors, name, count):
            with self._lock:
                self._open.append(stage)
            try:
                yield stage.wait_for
            finally:
                with self._lock:
                    self._open.remove(stage)
        seconds = time.monotonic() - stage.start
        if self._console and seconds >= WORTH_A_LINE_S:
            self._console.progress(f"{actors}: {name} took {table.duration(seconds)}")

    @contextmanager
    def _recorded(self, actors: str, name: str, count: int) -> Iterator[None]:
        """Records the events of a stage; a failed stage has no end."""
        if self._console is None:
            yield
            return
        start, facts = time.monotonic(), {"actors": actors, "stage": name, "count": count}
        self._console.record(Event("stage", f"{actors}: {name}", **facts))
        yield
        seconds = round(time.monotonic() - start, 3)
        self._console.record(Event("stage_done", f"{actors}: {name}", **facts, seconds=seconds))

    def text(self) -> str:
        """Returns the open stages of all groups of actors as one line; empty if no stage is open."""
        with self._lock:
            return " · ".join(stage.text() for stage in self._open)

    def _tick(self, phase: Phase, ended: threading.Event) -> None:
        while not ended.wait(EVERY_S):
            phase.describe(self.text())
