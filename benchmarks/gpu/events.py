"""Sums over the events of torch's profiler: time of kernels, launches, waits of the host, and the causes of waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.slice import LAUNCHES, SYNCS

NAME = 80
"""Characters kept of a name."""
MOST = 15
"""Entries of a list of kernels or operations."""
PARENTS = 4
"""Enclosing operations named for a wait."""
COPIES = ("Memcpy", "Memset")
"""Beginnings of the names of copies and fills on the device."""


@dataclass(frozen=True)
class Span:
    """A kernel, a copy on the device, or a call of CUDA's runtime."""

    name: str
    on_device: bool
    start_ns: int
    end_ns: int


def spans(recorded: Any) -> list[Span]:
    """Returns the events of a finished profile. Ranges of the user are left out."""
    from torch.autograd import DeviceType

    return [
        Span(event.name(), event.device_type() == DeviceType.CUDA, event.start_ns(), event.end_ns())
        for event in recorded.profiler.kineto_results.events()
        if not event.is_user_annotation()
    ]


def sums(events: Sequence[Span]) -> dict[str, float]:
    """Returns seconds of kernels, seconds with work on the device, and numbers of launches and waits."""
    on_device = [event for event in events if event.on_device]
    kernels = [event for event in on_device if not event.name.startswith(COPIES)]
    return {
        "kernels": sum(event.end_ns - event.start_ns for event in kernels) / 1e9,
        "busy": covered_ns((event.start_ns, event.end_ns) for event in on_device) / 1e9,
        "launches": sum(event.name in LAUNCHES for event in events),
        "waits": sum(event.name in SYNCS for event in events),
    }


def covered_ns(intervals: Iterable[tuple[int, int]]) -> int:
    """Returns the length of the union of intervals: kernels of several streams overlap."""
    covered, reached = 0, 0
    for start, end in sorted(intervals):
        covered += max(0, end - max(start, reached))
        reached = max(reached, end)
    return covered


def longest(events: Sequence[Span]) -> list[tuple[str, int, float]]:
    """Returns name, count and milliseconds of the kernels and copies with most time."""
    count, time_ns = Counter[str](), Counter[str]()
    for event in events:
        if event.on_device:
            count[event.name[:NAME]] += 1
            time_ns[event.name[:NAME]] += event.end_ns - event.start_ns
    return [(name, count[name], round(ns / 1e6, 3)) for name, ns in time_ns.most_common(MOST)]


def operations(recorded: Any) -> list[tuple[str, int, float]]:
    """Returns name, count and milliseconds of the CPU's operations and runtime calls with most time of their own."""
    found = sorted(recorded.key_averages(), key=lambda op: op.self_cpu_time_total, reverse=True)
    return [(op.key[:NAME], op.count, round(op.self_cpu_time_total / 1e3, 3)) for op in found[:MOST]]


def waits(recorded: Any) -> list[tuple[str, int]]:
    """Returns each kind of wait with the enclosing operations, innermost first, and the count."""
    return Counter(_within(event) for event in recorded.events() if event.name in SYNCS).most_common()


def _within(event: Any) -> str:
    names, at = [event.name], event.cpu_parent
    while at is not None and len(names) <= PARENTS:
        names.append(at.name[:NAME])
        at = at.cpu_parent
    return " < ".join(names)
