"""torch.profiler on one policy rank for one RL step, with events in the format of `telemetry.trace`."""

from __future__ import annotations

import json
import math
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from skyrl_mega.telemetry.trace import PER_RANK, RANKS, Span, named, write_part

LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")
"""Name prefixes of CUDA calls that start kernels; a graph counts once."""
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cuStreamSynchronize")
"""CUDA calls that wait for the GPU, as `.item()` and `.tolist()` do."""
END = "the profiler stops"
"""Name of the span around the profiler's own waits, which do not belong to the step."""


class RankProfiler:
    """A recording of a rank's operators, and of kernels on a GPU, from construction until `stop`.

    Args:
        rank: The rank.
        cuda: True if the rank uses a GPU.
    """

    def __init__(self, rank: int, cuda: bool) -> None:
        self.rank, self.cuda = rank, cuda
        self._profile = profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * cuda])
        self._profile.start()
        self._start = time.time()

    def stop(self, file: Path, step: Span) -> dict[str, float]:
        """Ends the recording, and writes the events into a part of a trace. Call once.

        Args:
            file: The file to write (`trace.write_part`); an existing file is replaced, missing folders are created.
            step: Name, start and end of the recorded step; times in the trace count from its start.

        Returns:
            On a GPU `launches` and `host_syncs`: the numbers of CUDA calls that started kernels and that waited for the
            GPU. {} without CUDA calls.

        Raises:
            ValueError: torch wrote another format than torch 2.13's.
            OSError: The file cannot be written.
        """
        if self.cuda:
            with record_function(END):
                torch.cuda.synchronize()  # running kernels belong to the step
        self._profile.stop()
        with tempfile.TemporaryDirectory() as folder:
            trace_file = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(trace_file))
            with trace_file.open() as text:
                events = RankEvents(self.rank, os.getpid(), text, step.start)
                step_event = {
                    **dict(ph="X", cat="step", name=step.name, tid=threading.get_native_id()),
                    **dict(pid=RANKS + self.rank * PER_RANK, ts=round((self._start - step.start) * 1e6, 3)),
                    "dur": round((step.end - self._start) * 1e6, 3),
                }
                write_part(file, chain([step_event], events))
        return events.calls if events.has_cuda_calls else {}


class RankEvents:
    """The events of a file of torch.profiler, to be iterated once; process ids and times are converted to the trace's.

    Args:
        rank: The rank.
        pid: The rank's process id in torch's file.
        text: The open file of torch.profiler.
        zero: Start of the trace, in seconds since the epoch.
    """

    def __init__(self, rank: int, pid: int, text: TextIO, zero: float) -> None:
        self.rank, self.text, self.zero = rank, text, zero
        self.process_ids: dict[int, int] = {pid: RANKS + rank * PER_RANK}
        self.has_cuda_calls = False
        self.launches = 0
        self.waits: list[float] = []
        self.end = math.inf

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield from named(RANKS + self.rank * PER_RANK, f"policy-{self.rank}")
        base, events = open_trace(self.text)
        offset = (base - round(self.zero * 1e9)) / 1000
        for event in events:
            pid = event.get("pid")
            if not isinstance(pid, int) or event["name"] in ("process_name", "process_labels", "process_sort_index"):
                continue  # events of the profiler, or names already set by `named`
            if pid not in self.process_ids:
                self.process_ids[pid] = RANKS + self.rank * PER_RANK + len(self.process_ids)
                yield from named(self.process_ids[pid], f"policy-{self.rank} GPU {pid}")
            if event.get("cat") in ("cuda_runtime", "cuda_driver"):
                self._call(event["name"], event["ts"])
            if event["name"] == END and event.get("cat") == "user_annotation":
                self.end = event["ts"]
            converted = {**event, "pid": self.process_ids[pid]}
            if "ts" in event:
                converted["ts"] = round(event["ts"] + offset, 3)
            if "id" in event:  # arrows from calls to kernels; ranks reuse the same ids
                converted["id"] = event["id"] + ((self.rank + 1) << 32)
            yield converted

    @property
    def calls(self) -> dict[str, float]:
        """`launches`, all CUDA calls that started kernels, and `host_syncs`, the waits for the GPU before the profiler
        stopped. Valid once all events have been iterated. All zeros without CUDA calls."""
        return {"launches": float(self.launches), "host_syncs": float(sum(at < self.end for at in self.waits))}

    def _call(self, name: str, at: float) -> None:
        self.has_cuda_calls = True
        self.launches += name.startswith(LAUNCHES)
        if name in WAITS:
            self.waits.append(at)


def open_trace(text: TextIO) -> tuple[int, Iterator[dict[str, Any]]]:
    """Reads the head of a torch.profiler file; returns its time origin, in nanoseconds since the epoch, and an iterator
    over all events in the order of the file, with times in microseconds since this origin.

    Keep `text` open while reading events. The file may be larger than memory: events are read one at a time.

    Raises:
        ValueError: The file does not start in torch 2.13's format.
    """
    base = None
    for line in text:
        if '"baseTimeNanoseconds"' in line:
            base = int(line.split(":")[1].strip(" ,\n"))
        if '"traceEvents"' in line:
            break
    if base is None:
        raise ValueError(
            f"{text.name}: the trace of torch {torch.__version__} contains no baseTimeNanoseconds; this version of "
            "skyrl_mega reads traces of torch 2.13"
        )
    return base, _events(text)


def _events(text: TextIO) -> Iterator[dict[str, Any]]:
    lines: list[str] = []
    for line in text:
        kind = line.rstrip()
        if kind == "  {":
            lines = [line]
        elif kind in ("  },", "  }") or kind.startswith("  }]"):
            if lines:
                yield json.loads("".join([*lines, "}"]))
            lines = []
        elif lines:
            lines.append(line)
