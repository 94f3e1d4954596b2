"""Timelines of steps as an SVG picture, with rows for the driver's phases, the policy's ranks, the engines and the
environments.

Steps follow each other without the gaps left by a resume. Colours are classes of the page's style; a phase has the same
colour as in the plot of times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from html import escape
from itertools import accumulate
from operator import add

import numpy as np

from skyrl_mega.report.plots import COLOURS, short, ticks
from skyrl_mega.telemetry.concurrency_series import ConcurrencySeries, Floats
from skyrl_mega.telemetry.step_timeline import CRITIC, POLICY, UPDATED, StepTimeline
from skyrl_mega.telemetry.trace import Span

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 1200, 104, 12, 20, 24
ROWS = 16
"""Most rows of engines; a larger number of engines shares rows."""
COLUMNS = 360
"""Columns of a row of engines or environments."""
GAP = 4
"""Space between two rows."""
LETTER = 6.4
"""Widest letter of a label. If two labels overlap, a label of a weight version is left out first, then a label of a
step."""


@dataclass(frozen=True)
class PlacedStep:
    """A step with a position in the picture."""

    step: StepTimeline
    before: float
    """Seconds from the picture's left end to the start of this step: the shown seconds of all earlier steps."""

    @property
    def seconds(self) -> float:
        """Number of seconds of this step in the picture, from `step.shown` to `step.end`."""
        return self.step.end - self.step.shown

    def at(self, time: float) -> float:
        """Returns the seconds from the picture's left end to a time of the wall clock, clipped to this step."""
        return self.before + min(max(time - self.step.shown, 0.0), self.seconds)


@dataclass(frozen=True)
class GanttRow:
    """A row of the picture."""

    name: str
    """Label of the row."""
    height: float
    """Height in SVG units."""
    draw: Callable[[float], Iterator[str]]
    """Yields the SVG elements of the row, given the vertical position of its top."""


def picture(steps: Sequence[StepTimeline], colours: Mapping[str, int]) -> str:
    """Returns an `<svg>` element with the steps' timelines, for a page with the report's style.

    Args:
        steps: Steps in order; not empty.
        colours: Phase → number of the colour in the style, from 0; numbers from `COLOURS` on start again at the first
            colour. Phases without an entry share the next number.
    """
    before = accumulate((step.end - step.shown for step in steps[:-1]), initial=0.0)
    canvas = Canvas([PlacedStep(step, at) for step, at in zip(steps, before, strict=True)], colours)
    rows, parts, top = canvas.rows(), list[str](), float(TOP)
    for row in rows:
        middle = top + row.height / 2 + 3.5
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{middle:.1f}" text-anchor="end">{escape(row.name)}</text>')
        parts.append(_box("lane", LEFT, canvas.right, top, row.height))
        parts += row.draw(top)
        top += row.height + GAP
    parts += canvas.marks(top - GAP)
    return f'<svg viewBox="0 0 {WIDTH} {top - GAP + BOTTOM:g}" role="img">{"".join(parts)}</svg>'


class Canvas:
    """Positions and SVG elements of the picture.

    Args:
        placed: Steps with their positions, in order; not empty.
        colours: Phase → number of the colour.
    """

    def __init__(self, placed: Sequence[PlacedStep], colours: Mapping[str, int]) -> None:
        self.placed, self.colours = placed, colours
        self.seconds = placed[-1].before + placed[-1].seconds
        self.right = WIDTH - RIGHT

    def x(self, seconds: float) -> float:
        """Returns the horizontal SVG position of a time, in seconds from the picture's left end."""
        return LEFT + seconds / self.seconds * (self.right - LEFT)

    def rows(self) -> list[GanttRow]:
        """Returns the rows from top to bottom: driver, policy, critic if any, engines, environments."""
        phases = {span.name for p in self.placed for span in p.step.phases}
        rows = [GanttRow("driver", 20, lambda top: self._phases(top, 20)), self._ranks("policy", POLICY)]
        if phases & set(CRITIC):
            rows.append(self._ranks("critic", CRITIC))
        return [*rows, *self._engines(), self._environments()]

    def marks(self, bottom: float) -> Iterator[str]:
        """Yields the SVG elements of the marks of steps and weight versions, and of the time axis below `bottom`."""
        begun, synced = list[tuple[float, str]](), list[tuple[float, str]]()
        for p in self.placed:
            begin = self.x(p.at(p.step.start))
            yield f'<line class="seam" x1="{begin:.1f}" x2="{begin:.1f}" y1="{TOP - 4}" y2="{bottom:.1f}"/>'
            begun.append((begin, f"step {p.step.step}"))
            if p.step.synced is not None:
                at = self.x(p.at(p.step.synced))
                yield f'<line class="seam weights" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{bottom:.1f}"/>'
                synced.append((at, f"▾ v{p.step.step}"))
        taken: list[tuple[float, float]] = []
        for style, labels in (("tick", begun), ("tick weights", synced)):
            for x, label in labels:
                end = x + LETTER * (len(label) + 1)
                if end <= WIDTH and all(end <= a or b <= x for a, b in taken):
                    taken.append((x, end))
                    yield f'<text class="{style}" x="{x:.1f}" y="{TOP - 7}">{label}</text>'
        marked = ticks(0.0, self.seconds, 9)
        for value in marked:
            label = short(value, marked[1] - marked[0] if len(marked) > 1 else 1.0)
            place = f'x="{self.x(value):.1f}" y="{bottom + 16:.1f}" text-anchor="middle"'
            yield f'<text class="tick" {place}>{label} s</text>'

    def _phases(self, top: float, height: float, names: Sequence[str] | None = None) -> Iterator[str]:
        for p in self.placed:
            for span in p.step.phases:
                if names is None or span.name in names:
                    colour = self.colours.get(span.name, len(self.colours)) % COLOURS
                    title = f"<title>{escape(span.name)} {span.end - span.start:.3g} s, step {p.step.step}</title>"
                    yield self._span(f"bar s{colour}", p, span, top, height, title)

    def _ranks(self, name: str, phases: Sequence[str]) -> GanttRow:
        return GanttRow(name, 14, lambda top: self._phases(top, 14, phases))

    def _engines(self) -> list[GanttRow]:
        count = max(len(p.step.engines) for p in self.placed)
        size = math.ceil(count / ROWS)
        groups = [range(first, min(first + size, count)) for first in range(0, count, size)]
        drawn = [[self._sampled(p, _mean(p.step, group)) for p in self.placed] for group in groups]
        most = max((float(counts.max()) for parts in drawn for counts, _ in parts), default=0.0)

        rows = zip(groups, drawn, strict=True)
        return [GanttRow(_group_name(group), 16, partial(self._engine, parts, most)) for group, parts in rows]

    def _engine(self, parts: Sequence[tuple[Floats, Floats]], most: float, top: float) -> Iterator[str]:
        for p in self.placed:
            for span in p.step.phases:
                if span.name in UPDATED:
                    yield self._span("updated", p, span, top, 16, f"<title>{span.name}</title>")
        yield self._area("busy", [shares for _, shares in parts], 1.0, top, 16)
        yield self._area("area s0", [counts for counts, _ in parts], most, top, 16)

    def _environments(self) -> GanttRow:
        parts = [self._sampled(p, p.step.environments)[0] for p in self.placed]
        most = max(float(counts.max()) for counts in parts)
        return GanttRow("environments", 26, lambda top: iter([self._area("area s2", parts, most, top, 26)]))

    def _sampled(self, p: PlacedStep, counted: ConcurrencySeries) -> tuple[Floats, Floats]:
        """Returns mean counts and busy shares in equal columns."""
        columns = max(2, round(COLUMNS * p.seconds / self.seconds))
        even = counted.at(np.linspace(p.step.shown, p.step.end, columns + 1))
        return even.counts, even.shares

    def _area(self, style: str, parts: Sequence[Floats], most: float, top: float, height: float) -> str:
        """Returns columns of all steps as a single outline. Every value above zero is visible."""
        base = top + height
        path, y = f"M{LEFT},{base:g}", f"{base:g}"
        for p, values in zip(self.placed, parts, strict=True):
            width = p.seconds / len(values)
            for i, value in enumerate(values):
                tall = max(1.0, height * min(1.0, value / most)) if value > 1e-9 else 0.0
                if (new := f"{base - tall:.1f}".removesuffix(".0")) != y:
                    path, y = f"{path}H{self.x(p.before + i * width):.1f}V{new}", new
        return f'<path class="{style}" d="{path}H{self.right}V{base:g}Z"/>'

    def _span(self, style: str, p: PlacedStep, span: Span, top: float, height: float, title: str) -> str:
        return _box(style, self.x(p.at(span.start)), self.x(p.at(span.end)), top, height, title)


def _box(style: str, left: float, right: float, top: float, height: float, inside: str = "") -> str:
    place = f'x="{left:.1f}" y="{top:g}" width="{max(0.6, right - left):.1f}" height="{height:g}"'
    return f'<rect class="{style}" {place}>{inside}</rect>' if inside else f'<rect class="{style}" {place}/>'


def _mean(step: StepTimeline, group: range) -> ConcurrencySeries:
    """Returns the average counts of a group of engines."""
    members = [step.engines[engine] for engine in group if engine < len(step.engines)]
    if not members:
        return ConcurrencySeries.empty(step.shown, step.end)
    if len(members) == 1:
        return members[0]
    edges = reduce(np.union1d, [engine.times for engine in members])
    even = [engine.at(edges) for engine in members]
    return ConcurrencySeries(
        edges, reduce(add, [e.sums for e in even]) / len(members), reduce(add, [e.busy for e in even]) / len(members)
    )


def _group_name(group: range) -> str:
    return f"engine {group[0]}" if len(group) == 1 else f"engines {group[0]}–{group[-1]}"
