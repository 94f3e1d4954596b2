"""Planted faults still fit the source, and each is caught by a test."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import plants
from tests.support.plants import PLANTS, Plant


@pytest.mark.parametrize("fault", PLANTS, ids=lambda fault: fault.fault)
def test_a_fault_can_be_planted_and_has_a_test(fault: Plant) -> None:
    assert (plants.ROOT / fault.path).read_text().count(fault.old) == 1 and fault.old != fault.new
    file, _, name = fault.test.partition("::")
    assert f"def {name}(" in (plants.ROOT / file).read_text()


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_every_planted_fault_is_caught(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "benchmarks.plants", "--results", str(tmp_path / "plants.json")]
    ended = subprocess.run(program, cwd=plants.ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
