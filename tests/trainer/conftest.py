"""A finished run for several tests to compare with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer import quickstart


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs `quickstart.THREE_STEPS` synchronously with all parts resident in memory and returns the run's folder."""
    folder = tmp_path_factory.mktemp("undisturbed")
    quickstart.finish(folder, "run.name=run", *quickstart.THREE_STEPS)
    return folder / "run"
