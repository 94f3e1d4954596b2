"""A valid configuration, for tests with changes."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the smallest valid configuration file."""
    file = tmp_path_factory.mktemp("configs") / "base.yaml"
    file.write_text(
        "model: {path: m}\ndata: {train: [t.parquet], prompts_per_step: 64}\n"
        "cluster: {device: cpu}\npolicy: {ranks: 8}\n"
    )
    return file
