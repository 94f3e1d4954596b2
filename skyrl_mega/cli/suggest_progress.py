"""Progress of `--suggest` on standard error, and its early end by Ctrl-C."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from skyrl_mega.cli.suggest_text import layout
from skyrl_mega.planner.search import SearchState

FIRST_S, TERMINAL_S, LINES_S = 3.0, 0.5, 5.0
"""Seconds until the first progress line, between updates on a terminal, and between lines elsewhere."""
CLEAR = "\r\x1b[K"
"""Clears the progress line of a terminal."""


class SearchProgress:
    """Prints the progress of a search and ends the search after Ctrl-C.

    Args:
        stream: Receives the lines; None takes standard error.
        clock: Returns the time in seconds.
    """

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = sys.stderr if stream is None else stream, clock
        self._terminal = self._stream.isatty()
        self._start = clock()
        self._next, self._printed = self._start + FIRST_S, False
        self.interrupted = False
        """True after Ctrl-C."""

    def __call__(self, progress: SearchState) -> bool:
        """Prints the progress if a line is due; returns True to continue the search, False after Ctrl-C."""
        now = self._clock()
        if now >= self._next and not self.interrupted:
            self._next, self._printed = now + (TERMINAL_S if self._terminal else LINES_S), True
            line = f"{now - self._start:.0f} s: {describe(progress)}; Ctrl-C ends the search"
            self._stream.write(f"{CLEAR}{line}" if self._terminal else f"{line}\n")
            self._stream.flush()
        return not self.interrupted

    @contextmanager
    def running(self) -> Iterator[None]:
        """Makes the first Ctrl-C inside the block set `interrupted`; a second Ctrl-C ends the process.

        Outside the main thread, signals are left alone. The end of the block restores the handler, and clears the
        progress line of a terminal.
        """
        if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
            yield
            return
        before = signal.signal(signal.SIGINT, self._interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
            if self._printed and self._terminal:
                self._stream.write(CLEAR)
                self._stream.flush()

    def _interrupt(self, number: int, frame: object) -> None:
        self.interrupted = True
        signal.signal(number, signal.SIG_DFL)


def describe(progress: SearchState) -> str:
    """Returns the progress as a line: number of settings tried, and the fastest layout so far, if any."""
    tried = f"{progress.evaluated:,} settings tried for {progress.gpus} GPUs"
    if progress.best is None:
        return f"{tried}, none fits so far"
    return f"{tried}, best so far {layout(progress.best.parallel)} with {progress.best.seconds:,.1f} s a step"
