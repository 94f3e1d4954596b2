"""Plots as inline SVG: lines over steps, and stacked times.

Colours are classes (`s0`, `s1`, …) of the page's style, so a plot fits both the light and the dark theme.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import pairwise
from typing import Any

WIDTH, HEIGHT = 440, 200
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 8, 22
"""Margins around the plotted area, with room for tick labels."""
COLOURS = 8
"""Number of colours in the page's style; higher numbers start again at the first colour."""
MOST = 300
"""Most points of a line; a longer line is drawn as means of neighbouring points."""
NOISY = 80
"""Number of points from which a line is drawn faintly under a smoothed line."""
TINY = 1e-100
"""Smallest value distinguished from 0."""
EQUAL = 1e-6
"""Relative difference of values equal up to rounding in float32."""
BARS = 90
"""Most bars of a stack; more bars become means of neighbours."""


@dataclass(frozen=True)
class Series:
    """A line of a plot."""

    name: str
    xs: Sequence[float]
    """Steps."""
    ys: Sequence[float | None]
    """Value of each step; None, NaN and infinity leave a gap."""
    colour: int = 0
    """Number of the colour."""
    dash: int = 0
    """Line style: 0 solid, 1 dashed, 2 dotted."""


@dataclass(frozen=True)
class Mark:
    """A vertical mark of an event between two steps."""

    x: float
    """Position in steps, such as 3.5 for an event after step 3."""
    text: str
    """Description shown at the mouse."""
    kind: str
    """Class of the page's style."""
    colour: int | None = None
    """Colour of a run; None for the colour of the kind."""


@dataclass(frozen=True)
class Drawing:
    """A drawn plot."""

    svg: str
    low: float = 0.0
    """Step at the left end of the plotted area."""
    high: float = 1.0
    """Step at the right end of the plotted area."""
    marks: tuple[Mark, ...] = ()
    """Marks inside the plotted area."""


@dataclass(frozen=True)
class Axis:
    """A linear or logarithmic map from values to SVG positions."""

    low: float
    """Value at `start`."""
    high: float
    """Value at `end`."""
    start: float
    """SVG position of `low`."""
    end: float
    """SVG position of `high`."""
    log: bool = False
    """True for a logarithmic map; all values are then above 0."""

    def place(self, value: float) -> float:
        """Returns the SVG position of a value."""
        low, high, v = (
            (math.log10(x) for x in (self.low, self.high, value)) if self.log else (self.low, self.high, value)
        )
        return self.start + (v - low) / (high - low) * (self.end - self.start)


def lines(series: Sequence[Series], log: bool = False, marks: Sequence[Mark] = ()) -> Drawing:
    """Draws lines over steps; returns an empty drawing without a finite value.

    Args:
        series: The lines. A line with more than `MOST` points is averaged; `NOISY` points and more without a gap are
            drawn faintly, with a smoothed line.
        log: True for a logarithmic vertical axis; values not above 0 then leave gaps, like None.
        marks: Events between steps.
    """
    thinned = [_thin(s) for s in series]
    usable = [y for s in thinned for y in s.ys if _usable(y, log)]
    xs = [x for s in thinned for x in s.xs]
    if not usable or not xs:
        return Drawing(_svg([]))
    across = _across(min(xs), max(xs))
    low, high = _bounds(min(y for y in usable if y is not None), max(y for y in usable if y is not None), log)
    up = Axis(low, high, HEIGHT - BOTTOM, TOP, log)
    inside = _inside(marks, across)
    parts = [*_grid(across, up), *_drawn(inside, across)]
    for s in thinned:
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
    return Drawing(_svg(parts), across.low, across.high, inside)


def is_flat(values: Sequence[float | None]) -> bool:
    """Returns True if all values equal the first, up to a relative difference of `EQUAL`.

    Returns False without values, or if a value is None.
    """
    first = values[0] if values else None
    return first is not None and all(
        value is not None and abs(value - first) <= EQUAL * max(abs(value), abs(first)) for value in values
    )


def stacked(
    names: Sequence[str], xs: Sequence[float], layers: Sequence[Sequence[float]], marks: Sequence[Mark] = ()
) -> Drawing:
    """Draws a bar per step, with layers (seconds) stacked from the bottom; more than `BARS` steps are averaged. Returns
    an empty drawing without steps.

    Args:
        names: Names of the layers.
        xs: Steps.
        layers: For each name a value per step, at least 0.
        marks: Events between steps.
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
    inside = _inside(marks, across)
    return Drawing(_svg([*parts, *_drawn(inside, across)]), across.low, across.high, inside)


def _inside(marks: Sequence[Mark], across: Axis) -> tuple[Mark, ...]:
    """Returns the marks within the axis. A mark up to a step beyond the end, as of a run that just resumed, moves to
    the end."""
    return tuple(replace(mark, x=min(mark.x, across.high)) for mark in marks if across.low <= mark.x <= across.high + 1)


def _drawn(marks: Sequence[Mark], across: Axis) -> list[str]:
    parts = []
    for mark in marks:
        x, style = (
            across.place(mark.x),
            f"mark {mark.kind}" + ("" if mark.colour is None else f" s{mark.colour % COLOURS}"),
        )
        title = f"<title>{escape(mark.text)}</title>"
        parts.append(
            f'<g class="{style}"><line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
            f'<path d="M{x - 4:.1f} {TOP - 7}h8l-4 7z"/>{title}</g>'
        )
    return parts


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Returns at most `most` evenly spaced round numbers from `low` to `high`; [low] for an empty range."""
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
    """Returns a tick's label, with enough digits to differ from a neighbour: 1200 → 1.2k, 0.00003 → 3e-5.

    Args:
        value: The number.
        step: Distance between two ticks.
    """
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
    """Returns each value averaged with neighbours up to `reach` points away; fewer at the ends."""
    ys = [y for _, y in run]
    near = [ys[max(0, i - reach) : i + reach + 1] for i in range(len(ys))]
    return [(x, sum(part) / len(part)) for (x, _), part in zip(run, near, strict=True)]


def _thin(series: Series) -> Series:
    """Averages neighbouring points of a line with too many points; gaps are ignored."""
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
    """Returns the points, split at gaps."""
    runs: list[list[tuple[float, float]]] = [[]]
    for x, y in zip(series.xs, series.ys, strict=True):
        if y is not None and _usable(y, log):
            runs[-1].append((x, y))
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _bounds(low: float, high: float, log: bool) -> tuple[float, float]:
    """Returns the bounds of an axis, with a small margin around the values."""
    if log:
        low, high = 10.0 ** math.floor(math.log10(low) + 1e-9), 10.0 ** math.ceil(math.log10(high) - 1e-9)
        return (low, high) if low < high else (low, 10 * low)
    if high - low <= max(EQUAL * abs(high), TINY):
        return (low - 0.1 * abs(low), high + 0.1 * abs(high)) if abs(high) > TINY else (0.0, 1.0)
    room = 0.06 * (high - low)
    # No margin below zero: zero is a floor unless there are negative values.
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
