"""The plot of `benchmarks.learning_table` as an SVG: held-out accuracy from start to end, and rewards by step."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from xml.sax.saxutils import escape

from benchmarks.learning_page import SEEDS
from benchmarks.learning_results import Results
from benchmarks.learning_rows import Row

BLUE, ORANGE, GREY, INK = "#2a6f97", "#c9703c", "#9a9a9a", "#222"
LEFT, WIDTH, LINE, TOP = 176, 330, 24, 78
CURVE_LEFT, CURVE_WIDTH, CURVE_HEIGHT = 660, 130, 18
TOTAL = CURVE_LEFT + CURVE_WIDTH + 24
TITLE = "Addition, trained from the same start with every advantage and loss"
LOWEST = 0.4
"""Accuracy at the left end, unless the minimum is lower; then the minimum rounded down to a tenth."""


def write_plot(results: Results, rows: Sequence[Row], file: Path) -> None:
    """Draws a line for every row with at least one measured seed."""
    measured = [row for row in rows if results.seeds(row.name)]
    if not measured or results.start is None:
        return
    accuracies_by_row = [_figures(results, row, "accuracy") for row in measured]
    low = min(LOWEST, int(min(min(accuracies) for accuracies in accuracies_by_row) * 10) / 10)
    start = _place(results.start["accuracy"], low)
    body: list[str] = []
    y = TOP
    for kind, of_kind in groupby(measured, key=lambda row: row.kind):
        body.append(_text(20, y + 4, kind, 'font-weight="bold"'))
        y += LINE
        for row in of_kind:
            body += _row(results, row, y, (low, start))
            y += LINE
        y += 8
    axis = [_text(LEFT, 44, "accuracy on held-out sums"), _text(CURVE_LEFT, 44, "reward, step by step")]
    for tenth in range(round(low * 10), 11, 2 if low < 0.3 else 1):
        x = _place(tenth / 10, low)
        axis.append(f'<path d="M{x:.1f} {TOP - 14}V{y - 8}" stroke="#e6e6e6"/>')
        axis.append(_text(x, TOP - 20, f"{tenth / 10:.1f}", f'text-anchor="middle" fill="{GREY}"'))
    axis.append(f'<path d="M{start:.1f} {TOP - 14}V{y - 8}" stroke="{GREY}" stroke-dasharray="4 3"/>')
    axis.append(_text(start + 5, y + 6, "start", f'fill="{GREY}"'))
    file.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{TOTAL}" height="{y + 20}" font-family="sans-serif" '
        f'font-size="13" fill="{INK}">\n<rect width="100%" height="100%" fill="#fff"/>\n'
        f'<text x="20" y="24" font-size="16">{TITLE}</text>\n' + "\n".join([*axis, *body]) + "\n</svg>\n"
    )


def _row(results: Results, row: Row, y: float, scale: tuple[float, float]) -> list[str]:
    """Draws a row: name, a bar from the start to the seeds' mean end, a dot per seed, and mean rewards of the steps."""
    (low, begin), seeds = scale, results.seeds(row.name)
    ends = _figures(results, row, "accuracy")
    end = _place(statistics.mean(ends), low)
    colour = BLUE if end > begin else ORANGE
    drawn = [_text(LEFT - 10, y + 4, row.name, 'text-anchor="end"')]
    drawn.append(f'<path d="M{begin:.1f} {y}H{end:.1f}" stroke="{colour}" stroke-width="7" stroke-opacity="0.35"/>')
    drawn += [f'<circle cx="{_place(a, low):.1f}" cy="{y}" r="3" fill="{colour}" fill-opacity="0.6"/>' for a in ends]
    drawn.append(f'<path d="M{end:.1f} {y - 7}V{y + 7}" stroke="{colour}" stroke-width="2.5"/>')
    few = "" if len(seeds) >= SEEDS else f"  {len(seeds)} of {SEEDS} seeds"
    drawn.append(_text(LEFT + WIDTH + 16, y + 4, f"{statistics.mean(ends):.3f}{few}"))
    drawn.append(_curve(_figures(results, row, "reward"), y, low, colour))
    return drawn


def _curve(rewards: Sequence[Sequence[float]], y: float, low: float, colour: str) -> str:
    """Draws the mean reward over seeds at every step, from `low` at the bottom to 1 at the top."""
    means = [statistics.mean(step) for step in zip(*rewards, strict=True)]
    across = CURVE_WIDTH / max(len(means) - 1, 1)
    bottom = y + CURVE_HEIGHT / 2
    points = " ".join(
        f"{CURVE_LEFT + i * across:.1f},{bottom - (m - low) / (1 - low) * CURVE_HEIGHT:.1f}"
        for i, m in enumerate(means)
    )
    base = f'<path d="M{CURVE_LEFT} {bottom}H{CURVE_LEFT + CURVE_WIDTH}" stroke="#e6e6e6"/>'
    return f'{base}<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>'


def _figures(results: Results, row: Row, name: str) -> list:  # type: ignore[type-arg]
    return [results.of(row.name, seed)[name] for seed in results.seeds(row.name)]


def _place(accuracy: float, low: float) -> float:
    return LEFT + (accuracy - low) / (1 - low) * WIDTH


def _text(x: float, y: float, text: str, style: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'
