"""Tracker for TensorBoard: the metrics as event files in `tensorboard/`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl_mega.config.options import Option
from skyrl_mega.telemetry.trackers.base import TrajectoryText

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorboardTracker:
    """Writes an event file per start of the run. TensorBoard hides steps of earlier files after the resumed step."""

    OPTIONS: Mapping[str, Option] = {}

    def __init__(self, folder: Path, options: Mapping[str, Any] | None = None) -> None:
        self._folder = folder / "tensorboard"
        self._first = 0
        self._writer: SummaryWriter | None = None

    def start(self, config: Mapping[str, Any], resumed_step: int | None) -> None:
        """Hides the metrics in event files of earlier starts from the step after `resumed_step` on; all of them if
        None.

        Takes effect with the first call of `log`.
        """
        self._first = 0 if resumed_step is None else resumed_step + 1

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the metrics of a step to the event file, which the first call creates."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), purge_step=self._first)
        for name, value in metrics.items():
            self._writer.add_scalar(name, float(value), step)
        self._writer.flush()

    def log_trajectories(self, step: int, trajectories: Sequence[TrajectoryText]) -> None:
        """Does nothing: event files hold no trajectories."""

    def close(self, failed: bool = False) -> None:
        """Closes the event file; does nothing if `log` was not called. `failed` has no effect."""
        if self._writer:
            self._writer.close()
