"""A few signals at random moments in the first seconds of a real run; `python -m benchmarks.signals` sends all."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.signals import ROOT, isolated


@pytest.mark.nightly
@pytest.mark.slow
def test_every_moment_of_a_start_ends_alike() -> None:
    command = isolated([])
    if subprocess.run([*command[: command.index("sh")], "true"], capture_output=True).returncode:
        pytest.skip("no namespaces here")
    signals = [sys.executable, "-m", "benchmarks.signals", "--count", "5", "--seed", "3", "--length", "8"]
    ended = subprocess.run(signals, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "5 of 5 ended with 75 and one line, and left nothing" in ended.stdout
