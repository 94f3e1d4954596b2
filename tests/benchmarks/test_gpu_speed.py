"""The proof `te_speed`: sums over a profile, causes of waits, and variants that fail."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu import events, te_speed
from benchmarks.gpu.events import Span
from benchmarks.gpu.proof import Bench

SEEN = [
    Span("gemm", True, 0, 4_000_000),
    Span("gemm", True, 2_000_000, 6_000_000),
    Span("Memcpy DtoH", True, 7_000_000, 8_000_000),
    Span("cudaLaunchKernel", False, 0, 1),
    Span("cudaLaunchKernel", False, 1, 2),
    Span("cudaStreamSynchronize", False, 2, 3),
]


def test_overlapping_kernels_are_counted_once_as_time_at_work() -> None:
    assert events.sums(SEEN) == {"kernels": 0.008, "busy": 0.007, "launches": 2, "waits": 1}


def test_the_longest_kernels_come_first_with_count_and_milliseconds() -> None:
    assert events.longest(SEEN) == [("gemm", 2, 8.0), ("Memcpy DtoH", 1, 1.0)]


def test_a_wait_is_named_with_the_operations_around_it() -> None:
    item = SimpleNamespace(name="aten::item", cpu_parent=None)
    inner = SimpleNamespace(name="aten::_local_scalar_dense", cpu_parent=item)
    found = [SimpleNamespace(name="cudaStreamSynchronize", cpu_parent=inner), item]
    recorded = SimpleNamespace(events=lambda: found)
    assert events.waits(recorded) == [("cudaStreamSynchronize < aten::_local_scalar_dense < aten::item", 1)]


def test_a_real_profile_can_be_read() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        torch.ones(4) @ torch.ones(4)
    assert "aten::dot" in {name for name, _, _ in events.operations(recorded)}
    assert "aten::dot" in {span.name for span in events.spans(recorded)}
    assert events.sums(events.spans(recorded))["kernels"] == 0


def test_a_line_that_makes_the_host_wait_is_named() -> None:
    with te_speed.waiting_lines() as lines:
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("another subject", stacklevel=1)
    ((line, count),) = lines.items()
    assert count == 1 and line.startswith("benchmarks/test_gpu_speed.py:")


def test_a_variant_that_fails_is_a_note_and_the_others_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def one(bench: Bench, rank: Any, variant: te_speed.Variant, tokens: int) -> dict[str, Any]:
        if tokens == 8192 and variant.recompute == "full":
            raise ValueError("no memory")
        return {"notes": {}, "passes": {"log-probs": (2.0, 4e12)}, "sums": {}}

    def unopened(bench: Bench, precision: str, recompute: str) -> None:
        if recompute == "selective":
            raise OSError("cannot be opened")

    variants = [te_speed.Variant(name, (8192, 32768), recompute=name) for name in ("full", "selective", "none")]
    monkeypatch.setattr(te_speed, "VARIANTS", {"bfloat16": variants})
    monkeypatch.setattr(te_speed, "_one", one)
    monkeypatch.setattr(te_speed, "_open", unopened)
    path = tmp_path / "bfloat16.jsonl"
    te_speed._measure(False, [str(path)], 0, "bfloat16", float("inf"))
    told = {(answer := json.loads(line))["name"]: answer for line in path.read_text().splitlines()}
    assert "no memory" in told["bfloat16, full, 8192 tokens"]["notes"]["failed"]
    assert "cannot be opened" in told["bfloat16, selective"]["notes"]["failed"]
    measured = [name for name, answer in told.items() if answer["passes"]]
    assert measured == [
        "bfloat16, full, 32768 tokens",
        "bfloat16, none, 8192 tokens",
        "bfloat16, none, 32768 tokens",
    ]


def test_no_variant_begins_after_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(te_speed, "_open", lambda *_: None)
    path = tmp_path / "FP8 products.jsonl"
    te_speed._measure(False, [str(path)], 0, "FP8 products", 0.0)
    notes = [json.loads(line)["notes"] for line in path.read_text().splitlines()]
    assert len(notes) == 3 and all("left out" in note for note in notes)
