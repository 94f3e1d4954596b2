"""Tests of the CUDA code in `weights/` (streams, events, NCCL, CUDA IPC) without a GPU, in separate processes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT

CASES = [
    "guests or wrong or leaves",
    pytest.param("fp8 or processes or handed or hangs", marks=pytest.mark.nightly),
]


@pytest.mark.parametrize("cases", CASES)
def test_the_exchange_on_streams(cases: str) -> None:
    pytest.importorskip("triton", reason="Triton is not installed: the kernels' text cannot run here")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/cuda/streamed.py", "-k", cases],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=850,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout
