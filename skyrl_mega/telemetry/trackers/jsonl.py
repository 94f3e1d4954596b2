"""Tracker for `metrics.jsonl`: a JSON object per step. Every run writes this file, because resuming and the report read
it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from skyrl_mega.common.safe_read import writing
from skyrl_mega.config.options import Option
from skyrl_mega.telemetry.metrics import finite, step_of
from skyrl_mega.telemetry.trackers.base import TrajectoryText


class JsonlTracker:
    """Writes rows with flat metric names (docs/metrics.md).

    A row is on disk when `log` returns, so a kill loses none. Values that are not finite become null to keep the file
    valid JSON. Trajectories are stored in separate files (trajectories/parquet.py).
    """

    OPTIONS: Mapping[str, Option] = {}

    def __init__(self, folder: Path, options: Mapping[str, Any] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "metrics.jsonl"
        self._file = self.path.open("a")

    def start(self, config: Mapping[str, Any], resumed_step: int | None) -> None:
        """Removes rows after `resumed_step` (None: all rows), malformed rows, and a partial row left by a kill, so a
        resumed run writes the same file as an uninterrupted run. Ignores `config`. Raises OSError if the file cannot be
        replaced."""
        last = -1 if resumed_step is None else resumed_step
        text = self.path.read_text(errors="replace")
        kept = [line for line in text.splitlines(keepends=True) if step_of(line) <= last]
        partial = self.path.with_suffix(".partial")
        partial.write_text("".join(kept))
        self._file.close()
        os.replace(partial, self.path)
        self._file = self.path.open("a")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends the row of `step`. Values may be Python, numpy or torch scalars. An OSError names the file."""
        with writing(self.path):
            self._file.write(json.dumps({"step": step, **finite(metrics)}, allow_nan=False) + "\n")
            self._file.flush()

    def log_trajectories(self, step: int, trajectories: Sequence[TrajectoryText]) -> None:
        """Does nothing: this file holds no trajectories."""

    def close(self, failed: bool = False) -> None:
        """Closes the file; `failed` has no effect."""
        self._file.close()
