"""`tensorboard/`: the same figures as event files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl_mega.config.options import Option
from skyrl_mega.telemetry.trackers.base import TrajectoryText

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorboardTracker:
    """Event files, one per start of the run. TensorBoard hides what an earlier file has after the resumed step."""

    OPTIONS: Mapping[str, Option] = {}

    def __init__(self, folder: Path, options: Mapping[str, Any] | None = None) -> None:
        self._folder = folder / "tensorboard"
        self._first = 0
        self._writer: SummaryWriter | None = None

    def start(self, config: Mapping[str, Any], resumed_step: int | None) -> None:
        """Figures from the step after `resumed_step` on replace those of earlier files."""
        self._first = 0 if resumed_step is None else resumed_step + 1

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds the figures of a step."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), purge_step=self._first)
        for name, value in metrics.items():
            self._writer.add_scalar(name, float(value), step)
        self._writer.flush()

    def log_trajectories(self, step: int, trajectories: Sequence[TrajectoryText]) -> None:
        """Nothing: they are not figures."""

    def close(self, failed: bool = False) -> None:
        """Ends the file."""
        if self._writer:
            self._writer.close()
