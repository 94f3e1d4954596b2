"""The benchmark of weight syncs: a small run, the comparison of bytes, and the reason for skipping."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from benchmarks.netns import unavailable
from tests.conftest import ROOT

SCRIPT = str(ROOT / "benchmarks" / "weight_sync.py")


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Imports the benchmark, a script that imports its neighbours, as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import weight_sync

    return weight_sync


def scenario(benchmark: ModuleType, layout: str):  # type: ignore[no-untyped-def]
    hf = benchmark.model(1) | {"hidden_size": 64, "vocab_size": 128, "moe_intermediate_size": 32}
    return benchmark.Scenario(
        hf=hf,
        parallel=benchmark.LAYOUTS[layout],
        engine_tensor=4,
        engines=1,
        ranks_per_node=2,
        host="127.0.0.1",
        mbit=100,
        bucket_bytes=2**16,
        timeout_s=30,
    )


def test_one_wrong_bit_is_counted(benchmark: ModuleType) -> None:
    import weight_sync_rank

    worker = weight_sync_rank.Process(scenario(benchmark, "tp2_ep2"), 5)
    worker.prepare(seed=1)
    assert worker.wrong_bytes() > 0  # nothing was written
    for name, expected in worker.expected.items():
        worker.params[name].copy_(expected)
    assert worker.wrong_bytes() == 0
    bits = worker.params["model.norm.weight"].view(torch.int16)
    bits[3] ^= 1
    assert worker.wrong_bytes() == 1
    bits[3] ^= 1
    before = {name: expected.clone() for name, expected in worker.expected.items()}
    worker.prepare(seed=2)
    for name, expected in worker.expected.items():
        assert (expected != before[name]).float().mean() > 0.9


@pytest.mark.parametrize("layout", ["tp2_ep2", "tp2_ep4"])
def test_the_bound_is_what_a_node_needs_once(benchmark: ModuleType, layout: str) -> None:
    """Compares the bound with the union of rows and columns, written out for TP4 over two nodes."""
    place = scenario(benchmark, layout)
    source, target = place.layouts()
    needed = 0
    for name, shape in source.tensors.items():
        size = 2 * torch.Size(shape).numel()
        whole = "norm" in name or name.endswith("mlp.gate.weight")
        needed += size if whole else size // 2  # half of the heads, columns, vocabulary rows, or rows of k and v
    assert benchmark.link_bound_bytes(place, source, target, 4) == needed
    # A single policy node with everything must send the needs of both engine nodes.
    alone = replace(place, parallel={"ranks": 2, "tensor": 2, "expert": 2})
    assert benchmark.link_bound_bytes(alone, alone.layouts()[0], target, 3) == 2 * needed


@pytest.mark.nightly
@pytest.mark.slow
def test_a_small_run(tmp_path: Path) -> None:
    if reason := unavailable():
        pytest.skip(reason)
    done = subprocess.run(
        [sys.executable, SCRIPT, "--layers", "1", "--repeats", "1", "--results", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=850,
    )
    assert (tmp_path / "weight_sync.json").exists(), done.stdout + done.stderr
    figures = json.loads((tmp_path / "weight_sync.json").read_text())
    ours, baseline = figures["ways"]["ours"], figures["ways"]["baseline"]
    assert ours["wrong_bytes"] == 0 and baseline["wrong_bytes"] == 0
    for node in (2, 3):  # an engine node receives at least its own part; a broadcast brings the whole model
        assert ours["bytes_in"][node] >= 0.5 * figures["model_bytes"]
        assert baseline["bytes_in"][node] >= figures["model_bytes"]
    assert ours["seconds"] > 0.9 * figures["bound_s"]
    assert ET.parse(tmp_path / "weight_sync.svg").getroot().tag.endswith("svg")
    assert "seconds, median" in done.stdout


def test_it_skips_with_a_reason_where_namespaces_are_not_allowed() -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT],
        env=os.environ | {"PATH": "/nonexistent"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0 and done.stdout.startswith("skipped: ") and "iproute2" in done.stdout
