"""`metrics.jsonl`, one object a step, and the same figures for TensorBoard."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from skyrl_mega.config.errors import UserError
from skyrl_mega.config.outside import Malformed, lines, parsed, reason
from skyrl_mega.config.values import LARGEST, shown

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


FIX = "remove that row, or give another run"


class MetricsWriter:
    """Writes a run's metrics under flat names (docs/metrics.md). A context manager.

    A row is on disk when `write` returns, so a killed process loses none. Figures that are not finite are null in
    metrics.jsonl, which stays valid JSON.

    Args:
        folder: The run's folder; gets `metrics.jsonl` and `tensorboard/`.
        tensorboard: Whether the latter is written.
    """

    def __init__(self, folder: Path, tensorboard: bool = True) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "metrics.jsonl"
        self._events = folder / "tensorboard" if tensorboard else None
        self._board: SummaryWriter | None = None
        self._first = 0
        self._file = self.path.open("a")

    def rewind(self, step: int) -> None:
        """Forgets rows after `step`, and half a row that a kill left: a resumed run writes what an unbroken one does.

        TensorBoard forgets the same steps. Call it before the first `write`.
        """
        text = self.path.read_text(errors="replace")
        kept = [line for line in text.splitlines(keepends=True) if _step(line) <= step]
        partial = self.path.with_suffix(".partial")
        partial.write_text("".join(kept))
        self._file.close()
        os.replace(partial, self.path)
        self._file = self.path.open("a")
        self._first = step + 1

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds the row of `step`. Values may be Python, numpy or torch scalars."""
        self._file.write(json.dumps({"step": step, **finite(metrics)}, allow_nan=False) + "\n")
        self._file.flush()
        if board := self._tensorboard():
            for name, value in metrics.items():
                board.add_scalar(name, float(value), step)
            board.flush()

    def close(self) -> None:
        """Ends both files."""
        self._file.close()
        if self._board:
            self._board.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _tensorboard(self) -> SummaryWriter | None:
        if self._events and not self._board:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(self._events), purge_step=self._first)
        return self._board


def finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Plain floats, None where a figure is not finite: what JSON can say."""
    return {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}


def read(path: Path) -> list[dict[str, float | None]]:
    """The rows of a metrics.jsonl, in order; half a last row, which a kill may leave, is left out.

    Raises:
        UserError: The file cannot be read, or a row is none: which, and why.
    """
    rows: list[dict[str, float | None]] = []
    try:
        for _, line in lines(path):
            if line.endswith(b"\n"):
                rows.append(_row(line))
    except Malformed as error:
        raise UserError(f"{path}, row {len(rows) + 1}: {error}; {FIX}") from error
    except OSError as error:
        raise UserError(f"{path}: {reason(error)}; {FIX}") from error
    return rows


def _row(line: bytes | str) -> dict[str, float | None]:
    """A row that is whole.

    Raises:
        Malformed: It is none, as half a row that a kill left.
    """
    row = parsed(line)
    if not isinstance(row, dict) or not _is_step(row.get("step")):
        raise Malformed("it has no step, a whole number from 0")
    for name, value in row.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise Malformed(f"{name}: {shown(value)}; allowed is a number or null")
    return row


def _step(line: str) -> float:
    """The step of a row; infinite for a line that is no whole row."""
    try:
        return float(_row(line)["step"] or 0)
    except Malformed:
        return math.inf


def _is_step(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST
