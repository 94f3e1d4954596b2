"""What tests of `make gpu` share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where results of the tests' device are kept."""
    return tmp_path / "kept" / "a-gpu.json"
