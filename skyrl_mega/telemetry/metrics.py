"""Reading of `metrics.jsonl`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skyrl_mega.common.errors import UserError
from skyrl_mega.common.safe_read import Malformed, error_reason, parse_json, read_lines
from skyrl_mega.common.values import LARGEST, shown

FIX = "remove that row, or give another run"


def finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Returns the metrics as Python floats, with None in place of NaN and infinity, which JSON cannot represent."""
    return {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}


def read(path: Path) -> list[dict[str, float | None]]:
    """Returns the rows of a metrics.jsonl in order, without a partial last row, which a kill may leave. A row is name →
    value, with `step`; None is a value that was not finite.

    Raises:
        UserError: The file is missing or unreadable, or a row is malformed; the message gives row and reason.
    """
    rows: list[dict[str, float | None]] = []
    try:
        for _, line in read_lines(path):
            if line.endswith(b"\n"):
                rows.append(_row(line))
    except Malformed as error:
        raise UserError(error, key=f"{path}, row {len(rows) + 1}", fix=FIX) from error
    except OSError as error:
        raise UserError(error_reason(error), key=path, fix=FIX) from error
    return rows


def _row(line: bytes | str) -> dict[str, float | None]:
    """Parses a complete row.

    Raises:
        Malformed: The row is invalid, such as a partial row left by a kill.
    """
    row = parse_json(line)
    if not isinstance(row, dict) or not _is_step(row.get("step")):
        raise Malformed("it has no step, a whole number from 0")
    for name, value in row.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise Malformed(f"{name}: {shown(value)}; allowed is a number or null")
    return row


def step_of(line: str) -> float:
    """Returns the step of a row of `metrics.jsonl`; infinity for an incomplete or malformed row."""
    try:
        return float(_row(line)["step"] or 0)
    except Malformed:
        return math.inf


def _is_step(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST
