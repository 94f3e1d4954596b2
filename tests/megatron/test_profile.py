"""Tests of a rank's trace: from torch's file to a track of the run's trace."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from torch.profiler import record_function

from skyrl_mega.megatron.profile import END, RankEvents, RankProfiler, open_trace
from skyrl_mega.telemetry.trace import PER_RANK, RANKS, Span, TraceWriter
from tests.telemetry.trace_format import properly_nested, tracks, within

HEAD = """{
  "schemaVersion": 1,
  "deviceProperties": [
    {
      "id": 0, "name": "NVIDIA H100 80GB HBM3"
    }
  ],
  "displayTimeUnit": "ms",
  "baseTimeNanoseconds": 1700000000000000000,
  "traceEvents": [
"""


def file_of(folder: Path, events: list[dict[str, object]]) -> Path:
    """Writes a trace in torch's format: braces of an event on separate lines."""
    texts = ["  " + json.dumps(event, indent=2).replace("\n", "\n  ") for event in events]
    file = folder / "torch.json"
    file.write_text(HEAD + ",\n".join(texts) + '\n  ],"traceName": "x" }\n')
    return file


def test_what_a_rank_computes_is_a_track_with_the_days_clock(tmp_path: Path) -> None:
    start = time.time()
    profiler = RankProfiler(3, cuda=False)
    with record_function("train"):
        weight = torch.randn(64, 64, requires_grad=True)
        (weight @ weight).sum().backward()
    step = Span("step 5", start, time.time())
    part = tmp_path / "part.gz"
    assert profiler.stop(part, step) == {}, "on a CPU nothing is launched"
    with TraceWriter(tmp_path / "t.json.gz", start) as trace:
        trace.append(part)
    (name, spans), *others = tracks(tmp_path / "t.json.gz").items()
    assert (name, others) == ("policy-3", [])
    whole = next(span for span in spans if span["name"] == "step 5")
    train = next(span for span in spans if span["name"] == "train")
    products = [span for span in spans if span["name"] == "aten::mm"]
    assert len(products) == 3, "one forward and two backward"
    assert within(spans, whole, slack_us=1000) and within(products, train) and properly_nested(spans)
    assert {span["pid"] for span in spans} == {RANKS + 3 * PER_RANK}


def test_gpus_have_tracks_of_their_own_and_calls_are_counted(tmp_path: Path) -> None:
    runtime = {"ph": "X", "cat": "cuda_runtime", "pid": 900, "tid": 900, "dur": 1}
    file = file_of(
        tmp_path,
        [
            {"ph": "M", "name": "process_name", "pid": 900, "tid": 0, "ts": 0, "args": {"name": "python"}},
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": 7, "ts": 0, "args": {"name": "stream 7"}},
            {**runtime, "name": "cudaLaunchKernel", "ts": 1000.5, "args": {"a": {"b": 1}}},
            {**runtime, "name": "cudaLaunchKernelExC", "ts": 1010.5},
            {**runtime, "name": "cudaStreamSynchronize", "ts": 1020.5},
            {**runtime, "name": "cudaMemcpyAsync", "ts": 1030.5},
            {**runtime, "name": "cudaDeviceSynchronize", "ts": 2001.5},
            {**runtime, "name": END, "cat": "gpu_user_annotation", "ts": 1010.5, "pid": 0, "tid": 7},
            {**runtime, "name": END, "cat": "user_annotation", "ts": 2000.5},
            {**runtime, "name": "cudaDeviceSynchronize", "ts": 2010.5},
            {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 1040.5, "dur": 5, "args": {}},
            {"ph": "s", "cat": "ac2g", "name": "ac2g", "id": 5, "pid": 900, "tid": 900, "ts": 1000.5},
            {"ph": "f", "cat": "ac2g", "name": "ac2g", "id": 5, "pid": 0, "tid": 7, "ts": 1040.5, "bp": "e"},
            {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": "x", "ts": 0, "dur": 9},
        ],
    )
    with file.open() as text:
        rank_events = RankEvents(1, 900, text, 1_700_000_000.001)
        events = list(rank_events)
    rank_track, gpu = RANKS + PER_RANK, RANKS + PER_RANK + 1
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {rank_track: "policy-1", gpu: "policy-1 GPU 0"}
    assert [(e["pid"], e["ts"]) for e in events if e.get("cat") == "kernel"] == [(gpu, pytest.approx(40.5, abs=0.5))]
    arrows = {e["id"] for e in events if e["ph"] in "sf"}
    assert len(arrows) == 1 and arrows != {5}, "another rank has arrows of the same number"
    assert rank_events.has_cuda_calls and rank_events.calls == {"launches": 2, "host_syncs": 1}, (
        "the profiler's own waits are none of the step"
    )
    assert not any(e["pid"] == "Spans" for e in events)


def test_a_file_that_does_not_say_what_it_counts_from_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_text('{"traceEvents": [\n]}')
    with file.open() as text, pytest.raises(ValueError, match="baseTimeNanoseconds"):
        open_trace(text)
