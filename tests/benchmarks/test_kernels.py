"""The kernels' benchmark as far as it goes without a GPU: its cases run, and it skips with a reason."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from benchmarks import kernels as benchmark
from tests.conftest import ROOT


def test_every_case_runs_and_counts_its_bytes() -> None:
    cases = benchmark.fp8_cases("cpu", 1, 130, 256) + benchmark.box_cases("cpu", 16)
    assert len(cases) == 12 and all(benchmark.same(case) for case in cases)
    by_name = {case.name: case.nbytes for case in cases}
    assert by_name["quantise"] == 130 * 256 * 3
    assert by_name["pack 16 boxes of 4 KiB"] == 2 * 16 * 4096
    assert by_name["unpack 2 boxes of 384 KiB"] == 2 * 2 * 384 * 1024


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_it_skips_without_a_gpu() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "kernels.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and done.stdout == "skipped: no CUDA device\n"
