"""Protection against duplicate steps in stores without deletion: records the store's run id and the steps
already sent."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


class SentSteps:
    """Sends every step of a run to a store at most once, across kills and resumes.

    A resumed run repeats the steps after its checkpoint, and an append-only store would show these steps twice.
    Repeated steps are therefore skipped until the run passes the last step sent. A step is recorded before sending, and
    the record is undone if sending fails. A kill in between loses the step but never duplicates it.

    Args:
        file: JSON file with run id and last step.
    """

    def __init__(self, file: Path) -> None:
        self._file, self._run_id, self._last = file, "", -1

    def resume(self, resumed_step: int | None) -> str | None:
        """Reads the file, and returns the id of the store's run to continue; None if a new run must be created: without
        a resumed step or without the file. Raises ValueError or KeyError for a damaged file, and
        OSError for an unreadable file.

        Args:
            resumed_step: Last step of the checkpoint; None for a run from the beginning.
        """
        if resumed_step is None or not self._file.is_file():
            return None
        kept: dict[str, Any] = json.loads(self._file.read_text())
        self._run_id, self._last = str(kept["run_id"]), int(kept["last_step"])
        return self._run_id

    def begin(self, run_id: str) -> None:
        """Writes the id of a new run of the store to the file, with no step sent. Raises OSError if the file cannot be
        written."""
        self._run_id = run_id
        self._save(-1)

    def send_once(self, step: int, send: Callable[[], Any]) -> None:
        """Records the step in the file and calls `send`; on an exception of `send`, undoes the record and lets the
        exception out. Does nothing for a step already sent. Raises OSError if the file cannot be written."""
        before = self._last
        if step <= before:
            return
        self._save(step)
        try:
            send()
        except BaseException:
            self._save(before)
            raise

    def skipped_text(self, resumed_step: int | None) -> str:
        """Returns the last part of a line for the user: the steps that the run repeats now, and that are not sent
        again. Empty if no such steps exist.

        Args:
            resumed_step: Last step of the checkpoint; None for a run from the beginning, which repeats all steps sent.
        """
        first, last = (resumed_step or 0) + 1, self._last
        return f"; steps {first} to {last} are repeated now, and not written there again" if first <= last else ""

    def _save(self, step: int) -> None:
        self._last = step
        self._file.parent.mkdir(parents=True, exist_ok=True)
        partial = self._file.with_suffix(".partial")
        partial.write_text(json.dumps({"run_id": self._run_id, "last_step": step}))
        os.replace(partial, self._file)
