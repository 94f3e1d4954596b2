"""The plot of benchmarks/weight_sync.py: seconds, and bytes into each node, as an SVG of plain bars."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

COLOURS = ("#2a6f97", "#c9703c", "#7a7a7a")
LEFT, WIDTH, BAR, GAP = 190, 420, 18, 10


def write_plot(figures: dict[str, Any], ways: dict[str, str], file: Path) -> None:
    """Writes `file` from the result of `weight_sync.run`; `ways` maps keys to titles."""
    seconds = [[figures["ways"][way]["seconds"]] for way in ways]
    spread = [(figures["ways"][way]["seconds_min"], figures["ways"][way]["seconds_max"]) for way in ways]
    into = [[bytes_in / 1e6 for bytes_in in figures["ways"][way]["bytes_in"]] for way in ways]
    drawn: list[str] = []
    y = 58
    for i, title in enumerate(ways.values()):
        x = LEFT + 210 * i
        drawn.append(f'<rect x="{x}" y="{y - 10}" width="11" height="11" fill="{COLOURS[i]}"/>')
        drawn.append(_text(x + 17, y, title))
    y = _bars(drawn, y + 30, "seconds", ["all weights"], seconds, "{:.2f} s")
    scale = WIDTH / max(max(row) for row in seconds)
    for i, (low, high) in enumerate(spread):  # from the fastest to the slowest
        middle = y - GAP - (len(spread) - i) * BAR + BAR / 2
        drawn.append(
            f'<path d="M{LEFT + low * scale:.1f} {middle}H{LEFT + high * scale:.1f}" stroke="#222" stroke-width="1.5"/>'
        )
    at = LEFT + figures["bound_s"] * scale
    drawn.append(
        f'<path d="M{at:.1f} {y - GAP - len(spread) * BAR - 5}V{y - 4}" stroke="#222" stroke-dasharray="4 3"/>'
    )
    drawn.append(_text(at + 4, y + 8, f"the links' limit, {figures['bound_s']:.2f} s"))
    y = _bars(drawn, y + 36, "megabytes into each node", figures["nodes"], into, "{:.1f}")
    title = f"Weight sync of {figures['model_bytes'] / 1e6:.0f} MB over links of {figures['mbit']:g} Mbit/s"
    file.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 90}" height="{y + 10}" '
        'font-family="sans-serif" font-size="13" fill="#222">\n'
        '<rect width="100%" height="100%" fill="#fff"/>\n'
        f'<text x="20" y="30" font-size="16">{escape(title)}</text>\n' + "\n".join(drawn) + "\n</svg>\n"
    )


def _bars(
    drawn: list[str], y: float, title: str, groups: Sequence[str], values: Sequence[Sequence[float]], form: str
) -> float:
    """Draws a panel of horizontal bars from `y` down, `values[way][group]`; returns the lower end."""
    drawn.append(f'<text x="20" y="{y}" font-weight="bold">{escape(title)}</text>')
    largest = max(max(row) for row in values) or 1
    y += GAP
    for g, group in enumerate(groups):
        drawn.append(_text(20, y + len(values) * BAR / 2 + 4, group))
        for i, row in enumerate(values):
            width = row[g] / largest * WIDTH
            drawn.append(
                f'<rect x="{LEFT}" y="{y + i * BAR}" width="{width:.1f}" height="{BAR - 2}" fill="{COLOURS[i]}"/>'
            )
            drawn.append(_text(LEFT + width + 6, y + i * BAR + BAR / 2 + 4, form.format(row[g])))
        y += len(values) * BAR + GAP
    return y


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'
