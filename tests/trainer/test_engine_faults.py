"""A run survives engine workers killed or stopped during a weight sync."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.conftest import ROOT


@pytest.mark.slow
def test_a_killed_and_a_stopped_worker() -> None:
    """Runs the benchmark with one kill and one stop: the run ends in time and serves no wrong weight."""
    command = [sys.executable, "benchmarks/sync_faults.py", "--faults", "2", "--no-file"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=850, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SIGKILL" in done.stdout
    assert "SIGSTOP" in done.stdout
