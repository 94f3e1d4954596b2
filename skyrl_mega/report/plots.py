"""Plots as inline SVG: lines over steps, and times stacked.

Colours are classes (`s0`, `s1`, …) of the page's style, so that a plot is right in the light and in the dark.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any

WIDTH, HEIGHT = 440, 200
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 8, 22
"""Margins round the plotted area, in which the ticks' labels stand."""
COLOURS = 8
MOST = 300
"""Points of a line at most: longer ones are drawn as the means of neighbours."""
NOISY = 80
"""From so many points on, a line is drawn faintly and the means of each point's neighbours over it."""
TINY = 1e-100
"""What is less is 0."""
BARS = 90
"""Bars of a stack at most, likewise."""


@dataclass(frozen=True)
class Series:
    """A line: equally long steps and values. A value None leaves a gap."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float | None]
    colour: int = 0
    dash: int = 0
    """0 is a whole line, 1 has dashes, 2 dots."""


@dataclass(frozen=True)
class Drawing:
    """An SVG, and the steps at the left and the right end of its plotted area."""

    svg: str
    low: float = 0.0
    high: float = 1.0


@dataclass(frozen=True)
class Axis:
    """From values to places, linear or by decades."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def place(self, value: float) -> float:
        """Where a value stands."""
        low, high, v = (
            (math.log10(x) for x in (self.low, self.high, value)) if self.log else (self.low, self.high, value)
        )
        return self.start + (v - low) / (high - low) * (self.end - self.start)


def lines(series: Sequence[Series], log: bool = False) -> Drawing:
    """Lines over steps. With `log`, decades; values that are not above 0 leave gaps then."""
    drawn = [_thin(s) for s in series]
    usable = [y for s in drawn for y in s.ys if _usable(y, log)]
    xs = [x for s in drawn for x in s.xs]
    if not usable or not xs:
        return Drawing(_svg([]))
    across = _across(min(xs), max(xs))
    low, high = _bounds(min(y for y in usable if y is not None), max(y for y in usable if y is not None), log)
    up = Axis(low, high, HEIGHT - BOTTOM, TOP, log)
    parts = _grid(across, up)
    for s in drawn:
        style = f"s{s.colour % COLOURS} d{min(2, s.dash)}"
        for run in _unbroken(s, log):
            if len(run) >= NOISY:
                parts.append(_line(f"{style} faint", across, up, run))
                parts.append(_line(style, across, up, _smooth(run, len(run) // 40)))
            elif len(run) > 1:
                parts.append(_line(style, across, up, run))
            if len(run) == 1 or len(s.xs) <= 30:
                parts += [
                    f'<circle class="dot {style}" cx="{across.place(x):.1f}" cy="{up.place(y):.1f}" r="2"/>'
                    for x, y in run
                ]
    return Drawing(_svg(parts), across.low, across.high)


def stacked(names: Sequence[str], xs: Sequence[float], layers: Sequence[Sequence[float]]) -> Drawing:
    """Bars over steps, one layer on another.

    Args:
        names: Of the layers.
        xs: Steps.
        layers: One value a step for each name, none below 0.
    """
    if not xs:
        return Drawing(_svg([]))
    size = math.ceil(len(xs) / BARS)
    middles = [sum(part) / len(part) for part in _parts(xs, size)]
    means = [[sum(part) / len(part) for part in _parts(layer, size)] for layer in layers]
    highest = max(map(sum, zip(*means, strict=True)), default=0.0)
    gap = min((b - a for a, b in pairwise(middles)), default=1.0)
    across = _across(middles[0] - gap / 2, middles[-1] + gap / 2)
    up = Axis(0.0, _bounds(0.0, highest, False)[1], HEIGHT - BOTTOM, TOP)
    parts = _grid(across, up)
    width = max(1.0, 0.82 * (across.place(gap) - across.place(0.0)))
    for i, x in enumerate(middles):
        below = 0.0
        for k, (name, layer) in enumerate(zip(names, means, strict=True)):
            top, bottom = up.place(below + layer[i]), up.place(below)
            below += layer[i]
            if bottom - top > 0.05:
                left = across.place(x) - width / 2
                box = f'x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{bottom - top:.1f}"'
                title = f"<title>{escape(name)} {layer[i]:.3g} s</title>"
                parts.append(f'<rect class="bar s{k % COLOURS}" {box}>{title}</rect>')
    return Drawing(_svg(parts), across.low, across.high)


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers within [low, high], `most` at most."""
    span = high - low
    if span <= 0:
        return [low]
    raw = span / max(1, most - 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def short(value: float, step: float) -> str:
    """A tick's label with the digits that tell it from one `step` away: 1200 → 1.2k, 0.00003 → 3e-5."""
    if abs(value) < step / 1e6:
        return "0"
    if max(abs(value), step) < 1e-3 or abs(value) >= 1e15:
        mantissa, _, exponent = f"{value:.1e}".partition("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    unit, letter = next(
        ((u, n) for u, n in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")) if abs(value) >= u), (1, "")
    )
    digits = next((d for d in range(9) if abs(round(step / unit, d) - step / unit) < 1e-6 * step / unit), 9)
    text = f"{value / unit:.{digits}f}"
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text}{letter}"


def _line(style: str, across: Axis, up: Axis, run: Sequence[tuple[float, float]]) -> str:
    points = " ".join(f"{across.place(x):.1f},{up.place(y):.1f}" for x, y in run)
    return f'<polyline class="line {style}" points="{points}"/>'


def _smooth(run: Sequence[tuple[float, float]], reach: int) -> list[tuple[float, float]]:
    """Each value as the mean of those up to `reach` places away; there are fewer at the ends."""
    ys = [y for _, y in run]
    near = [ys[max(0, i - reach) : i + reach + 1] for i in range(len(ys))]
    return [(x, sum(part) / len(part)) for (x, _), part in zip(run, near, strict=True)]


def _thin(series: Series) -> Series:
    """Means of neighbours where there are too many points; a gap counts for nothing."""
    size = math.ceil(len(series.xs) / MOST)
    if size <= 1:
        return series
    xs = [sum(part) / len(part) for part in _parts(series.xs, size)]
    kept = [[y for y in part if y is not None and math.isfinite(y)] for part in _parts(series.ys, size)]
    return Series(series.name, xs, [sum(k) / len(k) if k else None for k in kept], series.colour, series.dash)


def _parts(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [items[i : i + size] for i in range(0, len(items), size)]


def _usable(y: float | None, log: bool) -> bool:
    return y is not None and math.isfinite(y) and (not log or y > 0)


def _unbroken(series: Series, log: bool) -> list[list[tuple[float, float]]]:
    """The points, cut at gaps."""
    runs: list[list[tuple[float, float]]] = [[]]
    for x, y in zip(series.xs, series.ys, strict=True):
        if y is not None and _usable(y, log):
            runs[-1].append((x, y))
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _bounds(low: float, high: float, log: bool) -> tuple[float, float]:
    """Of the axis: a little more than the values need."""
    if log:
        low, high = 10.0 ** math.floor(math.log10(low) + 1e-9), 10.0 ** math.ceil(math.log10(high) - 1e-9)
        return (low, high) if low < high else (low, 10 * low)
    if high - low <= max(1e-6 * abs(high), TINY):  # the same but for rounding
        return (low - 0.1 * abs(low), high + 0.1 * abs(high)) if abs(high) > TINY else (0.0, 1.0)
    room = 0.06 * (high - low)
    # Zero is a floor that values rest on; nothing is drawn below it unless something is there.
    return (0.0 if low == 0 else low - room), high + room


def _across(low: float, high: float) -> Axis:
    if low == high:
        low, high = low - 0.5, high + 0.5
    return Axis(low, high, LEFT, WIDTH - RIGHT)


def _grid(across: Axis, up: Axis) -> list[str]:
    if up.log:
        decades = range(round(math.log10(up.low)), round(math.log10(up.high)) + 1)
        heights = [10.0**d for d in decades if (d - decades[0]) % math.ceil(len(decades) / 5) == 0]
    else:
        heights = ticks(up.low, up.high)
    parts = []
    for value in heights:
        gap = value if up.log else heights[-1] - heights[-2] if len(heights) > 1 else abs(value) or 1.0
        y = up.place(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(
            f'<text class="tick" x="{LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{short(value, gap)}</text>'
        )
    for value in ticks(across.low, across.high, 7):
        if value == round(value):
            x = across.place(value)
            parts.append(f'<text class="tick" x="{x:.1f}" y="{HEIGHT - 6}" text-anchor="middle">{value:g}</text>')
    return parts


def _svg(parts: list[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg>'
