"""A trace that Perfetto opens (ui.perfetto.dev): one JSON file in the trace event format, compressed, of the spans that
several processes have measured.

Every process has a track of its own, named after what it is. Times are microseconds since the trace's beginning, by
each node's own clock of the day: nodes must agree on it (NTP) for their tracks to.
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
"""Numbers of tracks: those of the driver, of environments, of engine 0 and of policy rank 0."""
PER_RANK = 1000
"""A rank has a track for itself, and one for each of its GPUs."""
_HEAD = b'{"displayTimeUnit":"ms","traceEvents":[\n'


@dataclass(frozen=True)
class Span:
    """Something that took a while."""

    name: str
    start: float
    """Seconds of the day's clock (`time.time`)."""
    end: float
    about: Mapping[str, Any] = field(default_factory=dict)
    """What a click on it tells."""


def is_trace(file: Path) -> bool:
    """Returns True if `TraceWriter` wrote a file."""
    try:
        with gzip.open(file) as opened:
            return opened.read(len(_HEAD)) == _HEAD
    except (OSError, EOFError, zlib.error):
        return False


def day(clock: float) -> float:
    """A time of `time.perf_counter` by the day's clock."""
    return clock + (time.time() - time.perf_counter())


class TraceWriter:
    """Writes a trace, event by event. A context manager; the file is there only once it is whole.

    Args:
        file: Ends in `.json.gz`.
        zero: When the trace begins, in seconds of the day's clock.
    """

    def __init__(self, file: Path, zero: float) -> None:
        self.file, self.zero = file, zero
        self._partial = file.with_name(f"{file.name}.partial")

    def __enter__(self) -> Self:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self._out = gzip.open(self._partial, "wb", compresslevel=5)
        self._out.write(_HEAD)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None:
            end = {"ph": "M", "name": "process_labels", "pid": DRIVER, "tid": 0, "args": {"labels": "skyrl_mega"}}
            self._out.write(_line(end)[:-2] + b"\n]}\n")  # JSON allows no comma before it
        self._out.close()
        if error is None:
            os.replace(self._partial, self.file)
        else:
            self._partial.unlink(missing_ok=True)

    def process(self, pid: int, name: str, spans: Iterable[Span], lane: str, *, nested: bool = False) -> None:
        """A process's track, with its spans.

        Args:
            pid: The track's number, by which tracks are sorted.
            name: What it is called.
            spans: In any order.
            lane: What its lines are called: spans that overlap lie in different ones.
            nested: They lie inside one another, and in one line.
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
        """A process's counter, as a step function: (seconds of the day's clock, value from then on)."""
        for at, value in points:
            ts = round((at - self.zero) * 1e6, 3)
            self.event({"ph": "C", "name": what, "pid": pid, "tid": 0, "ts": ts, "args": {what: round(value, 3)}})

    def event(self, event: Mapping[str, Any]) -> None:
        """One event, its `ts` in microseconds since `zero`."""
        self._out.write(_line(event))

    def append(self, part: Path) -> None:
        """The events of a part (`write_part`), as they are: however many, they are never in memory at once."""
        with gzip.open(part, "rb") as events:
            shutil.copyfileobj(events, self._out, 2**20)


def write_part(file: Path, events: Iterable[Mapping[str, Any]]) -> None:
    """Writes events, with times as the trace is to have them, for `TraceWriter.append`."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(file, "wb", compresslevel=1) as out:
        for event in events:
            out.write(_line(event))


def named(pid: int, name: str) -> list[dict[str, Any]]:
    """The events that give a track its name and its place."""
    meta = {"ph": "M", "pid": pid, "tid": 0}
    return [
        {**meta, "name": "process_name", "args": {"name": name}},
        {**meta, "name": "process_sort_index", "args": {"sort_index": pid}},
    ]


def lanes(spans: Iterable[Span]) -> Iterable[tuple[int, Span]]:
    """Each span with the lowest line that is free when it begins: spans in one line never overlap."""
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
