"""The rows of `metrics.jsonl`, read back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skyrl_mega.config.errors import UserError
from skyrl_mega.config.outside import Malformed, lines, parsed, reason
from skyrl_mega.config.values import LARGEST, shown

FIX = "remove that row, or give another run"


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


def step_of(line: str) -> float:
    """The step of a row; infinite for a line that is no whole row."""
    try:
        return float(_row(line)["step"] or 0)
    except Malformed:
        return math.inf


def _is_step(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST
