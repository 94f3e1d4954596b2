"""The tiny models of all families, made once for all workers of a test run."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from tests.families.models import make_all
from tests.support.ranks import run_ranks


@pytest.fixture(scope="session")
def families(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder with the models NAME-0 and NAME-1, and the references, of every family."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # shared by all workers
    models = folder / "families"
    with (folder / "families.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not models.exists():
            models.mkdir()
            run_ranks(1, make_all, models)
    return models
