"""The benchmark of kernels without a GPU: all cases run, and the benchmark skips with a reason."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from benchmarks import kernels as benchmark
from benchmarks.head import SHAPES, TINY
from tests.conftest import ROOT


def test_every_case_runs_and_counts_its_bytes() -> None:
    cases = benchmark.fp8_cases("cpu", 1, 130, 256) + benchmark.box_cases("cpu", 16)
    assert len(cases) == 12 and all(benchmark.same(case) for case in cases)
    by_name = {case.name: case.nbytes for case in cases}
    assert by_name["quantise"] == 130 * 256 * 3
    assert by_name["pack 16 boxes of 4 KiB"] == 2 * 16 * 4096
    assert by_name["unpack 2 boxes of 384 KiB"] == 2 * 2 * 384 * 1024


def test_heads_at_tiny_shapes() -> None:
    def once(work: Callable[[], object]) -> float:
        work()
        return 2.0

    rows = benchmark.head_rows("cpu", TINY, 16, once)
    assert [row.way for row in rows] == ["fused", "fused", "chunked", "chunked"] * 2 and all(row.same for row in rows)
    product = 2 * 64**3 / 2
    assert rows[1].share_of_product == 4 * (2 * 64 * 32 * 500) / 2 / product
    assert rows[0].buffer_bytes == 4 * 4 * 2 * 64 and rows[1].buffer_bytes == 64 * (500 * 2 + 32 * 4)
    assert rows[2].buffer_bytes is None


def test_the_published_shapes() -> None:
    assert [(shape.hidden, shape.columns) for shape in SHAPES] == [
        *((2048, 151936), (2048, 37984)),
        *((4096, 151936), (4096, 37984)),
    ]
    assert SHAPES[0].product == 2 * 8192 * 2048 * 151936
    assert SHAPES[0].buffers(2) == (4 * 4 * 33 * 8192, 8192 * (2048 * 2 + 2048 * 4))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_it_skips_without_a_gpu() -> None:
    command = [sys.executable, "-m", "benchmarks.kernels"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert done.returncode == 0 and done.stdout == "skipped: no CUDA device\n"
