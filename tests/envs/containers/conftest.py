"""Fixtures of the tests of container runtimes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from skyrl_mega.envs.containers import images, owner


@pytest.fixture(autouse=True)
def own_notes_and_no_reaper_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keeps the notes of images in the test's folder, and ends the reapers that the test has started."""
    monkeypatch.setattr(images, "NOTES", tmp_path / "notes")
    monkeypatch.setattr(owner, "_guards", {})
    yield
    for guard in owner._guards.values():
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(guard.process, signal.SIGKILL)
        os.close(guard.process)
        guard.stdin.close()
