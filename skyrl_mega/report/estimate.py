"""Comparison of the dry run's estimate with the run's measurements."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from statistics import median

from skyrl_mega.common import safe_read
from skyrl_mega.report import document
from skyrl_mega.report.run_data import RunData
from skyrl_mega.telemetry.table import number

FILE = "estimate.json"
"""Name of the file in a run's folder: metric → value expected by the dry run."""
FIRST = 2
"""First step compared with the estimate: step 1 includes compilation and memory allocation."""
TIMES = ("time/generate", "time/logprobs", "time/train", "time/sync", "time/residency", "time/other", "time/step")
ALONE = ("memory/", "perf/")
"""Prefixes of metrics shown even without an estimate."""


def read(folder: Path) -> dict[str, float]:
    """Returns metric → estimate from `estimate.json` in a run's folder, without values other than finite numbers; empty
    without this file.

    Raises:
        UserError: The file cannot be read.
    """
    file = folder / FILE
    if not file.is_file():
        return {}
    values = safe_read.read_json(file, f"remove {FILE}")
    return {name: float(value) for name, value in values.items() if _is_number(value)}


def rows(run: RunData, expected: Mapping[str, float]) -> Iterator[tuple[str, float | None, float | None]]:
    """Yields (metric, estimated, measured) for times, memory and speed, times first; None for an absent value. A metric
    with neither value is left out.

    The measured value is the median over the steps from `FIRST` on, or over all steps of a shorter run.

    Args:
        run: The run.
        expected: Metric → estimate (`read`).
    """
    others = sorted({n for n in [*run.names, *expected] if n.startswith(ALONE)})
    for name in (*TIMES, *others):
        values = [(x, y) for x, y in zip(*run.series(name), strict=True) if y is not None]
        later = [y for x, y in values if x >= FIRST] or [y for _, y in values]
        if later or name in expected:
            yield name, expected.get(name), median(later) if later else None


def table(run: RunData, name: str = "") -> str:
    """Returns the HTML table of a run's estimated and measured metrics; an empty text without an estimate or steps.

    Args:
        run: The run.
        name: Name of the run, for a page of several runs.

    Raises:
        UserError: `estimate.json` cannot be read.
    """
    expected = read(run.folder)
    if not expected or not run.rows:
        return ""
    body = []
    for metric, estimated, measured in rows(run, expected):
        ratio = f"{measured / estimated:.2f}" if estimated and measured is not None else "·"
        cells = (*("·" if value is None else number(value) for value in (estimated, measured)), ratio)
        body.append(f"<th>{escape(metric)}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}")
    title = f"Estimated and measured{f': {escape(name)}' if name else ''}"
    about = f"the dry run's estimate, and the median of the steps from {FIRST} on (docs/report.md)"
    heads = ("metric", "estimated", "measured", "measured / estimated")
    content = document.table(body, heads, "settings num")
    return f"<section><h2>{title} <small class='soft'>{about}</small></h2>{content}</section>"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
