"""A run that several tests compare others with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer import quickstart


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a synchronous run of `quickstart.THREE_STEPS`, all of whose parts stay in memory."""
    folder = tmp_path_factory.mktemp("undisturbed")
    quickstart.finish(folder, "run.name=run", *quickstart.THREE_STEPS)
    return folder / "run"
