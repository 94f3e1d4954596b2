"""Fixtures for the tests of `make gpu`."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Returns the file with the results of the tests' device."""
    return tmp_path / "kept" / "a-gpu.json"
