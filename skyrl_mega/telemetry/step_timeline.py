"""Timeline of a step: the driver's phases, the concurrency of engines and environments, and idle shares.

The stored form is small: times are whole milliseconds, and all series together contain some thousand intervals.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from skyrl_mega.common.safe_read import Malformed, parse_json
from skyrl_mega.telemetry.concurrency_series import ConcurrencySeries
from skyrl_mega.telemetry.trace import Span

FOLDER = "timeline"
"""Subfolder of a run's folder."""
MAX_INTERVALS, MIN_INTERVALS = 12_000, 64
"""Maximum number of intervals of all series in a file; each series may keep at least `MIN_INTERVALS`."""
MAX_BYTES = 2**26
"""Maximum size of a decompressed file."""
MAX_SECONDS = 1e8
"""Maximum length of a step in a file."""
NAME = re.compile(r"[a-z_]{1,40}")
"""Allowed names of phases."""
POLICY = ("logprobs", "train", "sync", "residency")
"""Phases in which policy ranks work; in the first, reference ranks work too."""
CRITIC = ("values", "critic")
"""Phases in which critic ranks work."""
UPDATED = ("sync", "residency")
"""Phases in which engines are updated: an engine without requests does not count as idle then."""


@dataclass(frozen=True)
class StepTimeline:
    """Activity of all processes in a step. Times are seconds of the wall clock."""

    step: int
    shown: float
    """Start of the displayed range: includes the checkpoint after the previous step, if any."""
    start: float
    """Start of the step."""
    end: float
    phases: Sequence[Span]
    """Phases of the driver, in order."""
    engines: Sequence[ConcurrencySeries]
    """Running requests, by engine."""
    environments: ConcurrencySeries
    """Running environment calls."""
    slots: int
    """Maximum number of concurrent environment calls."""
    absent: Sequence[int] = ()
    """Engines that did not run in the step: left before, or not yet in service."""

    @property
    def present(self) -> list[ConcurrencySeries]:
        """Running requests of each engine that ran in the step."""
        return [engine for number, engine in enumerate(self.engines) if number not in self.absent]

    def idle(self) -> dict[str, float]:
        """Returns the metrics of idle time, each a share from 0 to 1 of the step's duration.

        `idle/engines`: mean share in which an engine has no request and is not being updated. `idle/policy`: share
        without a phase of the policy. `idle/environments`: mean share of unused environment slots. `idle/bottleneck`:
        the smaller of engines and policy. At least one engine must have run in the step (`present`).
        """
        seconds = self.end - self.start
        updated = _within(self.phases, UPDATED, self.start, self.end)
        worked = [_worked(engine, self.start, self.end, updated) for engine in self.present]
        engines = 1 - sum(worked) / len(worked) / seconds
        policy = 1 - sum(b - a for a, b in _within(self.phases, POLICY, self.start, self.end)) / seconds
        calls = self.environments.total(self.start, self.end) / seconds / self.slots
        shares = {"engines": engines, "policy": policy, "environments": 1 - calls, "bottleneck": min(engines, policy)}
        return {f"idle/{name}": min(1.0, max(0.0, share)) for name, share in shares.items()}

    @property
    def synced(self) -> float | None:
        """End of the step's last weight sync, in seconds of the wall clock; None for a step without a sync."""
        return max((span.end for span in self.phases if span.name == "sync"), default=None)

    def dumps(self) -> bytes:
        """Returns the content of the step's file for `loads`: compressed JSON with rounded times and coarser series."""
        most = max(MIN_INTERVALS, MAX_INTERVALS // (len(self.engines) + 1))
        tree = {
            "step": self.step,
            "shown": round(self.shown, 3),
            "start": _ms(self.start - self.shown),
            "end": max(_ms(self.end - self.shown), _ms(self.start - self.shown) + 1),
            "slots": self.slots,
            "phases": [[s.name, _ms(s.start - self.shown), _ms(s.end - self.shown)] for s in self.phases],
            "engines": [_packed(engine, self.shown, most) for engine in self.engines],
            "environments": _packed(self.environments, self.shown, most),
            **({"absent": [*self.absent]} if self.absent else {}),
        }
        return gzip.compress(json.dumps(tree, separators=(",", ":")).encode(), 6, mtime=0)


def file_name(step: int) -> str:
    """Returns the file name of a step's timeline, such as `step_000010.json.gz`."""
    return f"step_{step:06d}.json.gz"


def loads(data: bytes) -> StepTimeline:
    """Parses the content of a step's file.

    Raises:
        Malformed: The content is invalid; the message says why.
    """
    unpack = zlib.decompressobj(wbits=31)
    try:
        text = unpack.decompress(data, MAX_BYTES)
    except zlib.error as error:
        raise Malformed(f"it is not compressed ({error})") from error
    if unpack.unconsumed_tail or not unpack.eof:
        raise Malformed(f"it is cut off, or has more than {MAX_BYTES} bytes")
    tree = parse_json(text)
    try:
        shown, end = _number(tree["shown"], 1e11), _number(tree["end"]) / 1e3
        timeline = StepTimeline(
            step=int(_number(tree["step"])),
            shown=shown,
            start=shown + _number(tree["start"]) / 1e3,
            end=shown + end,
            phases=[
                Span(_name(name), shown + _number(a) / 1e3, shown + _number(b) / 1e3) for name, a, b in tree["phases"]
            ],
            engines=[_unpacked(engine, shown) for engine in tree["engines"]],
            environments=_unpacked(tree["environments"], shown),
            slots=int(_number(tree["slots"])),
            absent=[int(_number(engine)) for engine in tree.get("absent", ())],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise Malformed(f"it is no step's timeline ({type(error).__name__}: {error})") from error
    if not timeline.present or timeline.slots < 1 or not timeline.shown <= timeline.start < timeline.end:
        raise Malformed("it has no engine, no environment slot, or no time between start and end")
    return timeline


def _packed(counted: ConcurrencySeries, zero: float, most: int) -> list[list[float]]:
    """Returns, for all intervals, lengths in milliseconds, mean counts and busy shares."""
    coarse = counted.coarser(most)
    edges = np.unique(np.round((coarse.times - zero) * 1e3))
    edges = edges if len(edges) > 1 else edges[0] + np.arange(2.0)
    even = coarse.at(edges / 1e3 + zero)
    lengths = [int(edges[0]), *np.diff(edges).astype(int).tolist()]
    return [lengths, np.round(even.counts, 2).tolist(), np.round(even.shares, 3).tolist()]


def _unpacked(packed: Sequence[Sequence[float]], zero: float) -> ConcurrencySeries:
    lengths, counts, shares = ([_number(value) for value in column] for column in packed)
    if len(lengths) < 2 or min(lengths[1:]) < 1 or not len(counts) == len(shares) == len(lengths) - 1:
        raise ValueError("the columns of a count (lengths, counts, shares) differ in length, or a length is below 1 ms")
    if max(shares) > 1:
        raise ValueError("a busy share is above 1")
    return ConcurrencySeries.from_intervals(zero + np.cumsum(lengths) / 1e3, counts, shares)


def _number(value: Any, most: float = MAX_SECONDS * 1e3) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise ValueError(f"{str(value)[:40]!r} is no number from 0 to {most:g}")
    return float(value)


def _name(value: Any) -> str:
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise ValueError(f"{str(value)[:40]!r} is no name of a phase")
    return value


def _ms(seconds: float) -> int:
    return max(0, math.floor(seconds * 1e3 + 0.5))


def _within(phases: Iterable[Span], names: Sequence[str], start: float, end: float) -> list[tuple[float, float]]:
    """Returns the times of these phases as disjoint intervals in order."""
    intervals: list[tuple[float, float]] = []
    for span in sorted(phases, key=lambda span: span.start):
        a, b = max(span.start, start, intervals[-1][1] if intervals else start), min(span.end, end)
        if span.name in names and a < b:
            intervals.append((a, b))
    return intervals


def _worked(engine: ConcurrencySeries, start: float, end: float, updated: Sequence[tuple[float, float]]) -> float:
    """Returns the seconds during which an engine served requests or was being updated."""
    return engine.busy_s(start, end) + sum(b - a - engine.busy_s(a, b) for a, b in updated)


def engine_series(
    by_engine: Mapping[int, ConcurrencySeries], count: int, start: float, end: float
) -> list[ConcurrencySeries]:
    """Returns a series for each of the engines 0 to `count` - 1, from `start` to `end`.

    An engine missing in `by_engine` gets a series with count 0.
    """
    return [
        by_engine[engine].between(start, end) if engine in by_engine else ConcurrencySeries.empty(start, end)
        for engine in range(count)
    ]
