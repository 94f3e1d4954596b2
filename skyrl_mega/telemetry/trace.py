"""Traces for Perfetto (ui.perfetto.dev): spans measured by several processes, in a compressed trace-event JSON file.

Each process owns a named track. Times are microseconds since the beginning of the trace, by the wall clock of each
node, so nodes need synchronised clocks (NTP).
"""

from __future__ import annotations

import gzip
import heapq
import json
import os
import shutil
import time
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

DRIVER, ENVIRONMENTS, ENGINES, RANKS = 1, 2, 10, 200_000
"""Track numbers of the driver, of environments, of engine 0 and of policy rank 0."""
PER_RANK = 1000
"""Number of tracks reserved per rank: the rank itself and its GPUs."""
_HEAD = b'{"displayTimeUnit":"ms","traceEvents":[\n'


@dataclass(frozen=True)
class Span:
    """A named interval of time."""

    name: str
    start: float
    """Seconds of the wall clock (`time.time`)."""
    end: float
    about: Mapping[str, Any] = field(default_factory=dict)
    """Details shown after a click on the span."""


def is_trace(file: Path) -> bool:
    """Returns True if the file starts like a file of `TraceWriter`; False if it differs or cannot be read."""
    try:
        with gzip.open(file) as opened:
            return opened.read(len(_HEAD)) == _HEAD
    except (OSError, EOFError, zlib.error):
        return False


def wall_clock(clock: float) -> float:
    """Converts a time of this process's `time.perf_counter` to seconds of the wall clock (`time.time`)."""
    return clock + (time.time() - time.perf_counter())


class TraceWriter:
    """Writer of a trace, event by event. A context manager; the file appears when the block ends without an error.
    Methods raise OSError if a file cannot be read or written.

    Args:
        file: Output path; ends in `.json.gz`.
        zero: Beginning of the trace in seconds of the wall clock.
    """

    def __init__(self, file: Path, zero: float) -> None:
        self.file, self.zero = file, zero
        self._partial = file.with_name(f"{file.name}.partial")

    def __enter__(self) -> Self:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self._out = gzip.open(self._partial, "wb", compresslevel=5)
        self._out.write(_HEAD)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            end = {"ph": "M", "name": "process_labels", "pid": DRIVER, "tid": 0, "args": {"labels": "skyrl_mega"}}
            self._out.write(_line(end)[:-2] + b"\n]}\n")  # JSON allows no comma before the bracket
        self._out.close()
        if error is None:
            os.replace(self._partial, self.file)
        else:
            self._partial.unlink(missing_ok=True)

    def process(self, pid: int, name: str, spans: Iterable[Span], lane: str, *, nested: bool = False) -> None:
        """Writes the track of a process with all spans.

        Args:
            pid: Track number, which also orders the tracks.
            name: Name of the track.
            spans: Spans in any order.
            lane: Name of the track's rows. Overlapping spans are drawn in different rows, called `lane 0`, `lane 1`, …
            nested: True if the spans lie inside each other and share a row.
        """
        for event in named(pid, name):
            self.event(event)
        placed = [(0, span) for span in spans] if nested else list(lanes(spans))
        for number in sorted({number for number, _ in placed}):
            called = lane if nested else f"{lane} {number}"
            self.event({"ph": "M", "name": "thread_name", "pid": pid, "tid": number, "args": {"name": called}})
        for number, span in placed:
            self.event(
                {
                    **dict(ph="X", cat=lane, name=span.name, pid=pid, tid=number),
                    "ts": round((span.start - self.zero) * 1e6, 3),
                    "dur": round(max(0.0, span.end - span.start) * 1e6, 3),
                    "args": dict(span.about),
                }
            )

    def count(self, pid: int, what: str, points: Iterable[tuple[float, float]]) -> None:
        """Writes a counter of a process as a step function.

        Args:
            pid: Track number of the process.
            what: Name of the counter.
            points: Seconds of the wall clock, and the value from then on.
        """
        for time_s, value in points:
            ts = round((time_s - self.zero) * 1e6, 3)
            self.event({"ph": "C", "name": what, "pid": pid, "tid": 0, "ts": ts, "args": {what: round(value, 3)}})

    def event(self, event: Mapping[str, Any]) -> None:
        """Writes an event of the trace-event format; its `ts`, if any, is in microseconds since `zero`."""
        self._out.write(_line(event))

    def append(self, part: Path) -> None:
        """Copies the events of a part (`write_part`) unchanged, without loading all of them into memory."""
        with gzip.open(part, "rb") as events:
            shutil.copyfileobj(events, self._out, 2**20)


def write_part(file: Path, events: Iterable[Mapping[str, Any]]) -> None:
    """Writes events to a gzip file for `TraceWriter.append`, in place of an existing file; creates missing folders.
    Raises OSError if the file cannot be written.

    Args:
        file: Output path.
        events: Events with times in microseconds since the trace's zero.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(file, "wb", compresslevel=1) as out:
        for event in events:
            out.write(_line(event))


def named(pid: int, name: str) -> list[dict[str, Any]]:
    """Returns the two trace events that give track `pid` its name and its position, ordered by `pid`."""
    meta = {"ph": "M", "pid": pid, "tid": 0}
    return [
        {**meta, "name": "process_name", "args": {"name": name}},
        {**meta, "name": "process_sort_index", "args": {"sort_index": pid}},
    ]


def lanes(spans: Iterable[Span]) -> Iterable[tuple[int, Span]]:
    """Yields (row, span) in order of start: the lowest row, from 0, free at the span's start. Spans in a row never
    overlap."""
    busy: list[tuple[float, int]] = []
    free: list[int] = []
    for span in sorted(spans, key=lambda span: (span.start, span.end)):
        while busy and busy[0][0] <= span.start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lane = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (span.end, lane))
        yield lane, span


def _line(event: Mapping[str, Any]) -> bytes:
    return json.dumps(event, separators=(",", ":"), default=str).encode() + b",\n"
