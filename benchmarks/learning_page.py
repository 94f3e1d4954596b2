"""The table of `benchmarks.learning_table`, for the terminal and for a page of the docs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from benchmarks.learning_results import Figures, Results
from benchmarks.learning_rows import SAMPLES, Row

SEEDS = 3
"""Seeds of a complete row; rows with fewer seeds show the number."""
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
"""Lines of the page around the text written by the command."""
HEADINGS = ("accuracy", "greedy", f"pass@{SAMPLES}", "entropy", "clipped", "mismatch", "seconds", "CPU s", "seeds")


def cells(figures: Sequence[Figures]) -> list[str]:
    """Returns a row's cells: means over the seeds, the accuracy with minimum and maximum, and the largest mismatch.

    Args:
        figures: Figures of each seed.
    """
    if not figures:
        return ["not measured yet", *("·" for _ in HEADINGS[1:])]
    accuracy = [f["accuracy"] for f in figures]
    spread = f" ({min(accuracy):.3f} to {max(accuracy):.3f})" if len(figures) > 1 else ""
    scores = [
        f"{statistics.mean(accuracy):.3f}{spread}",
        f"{_mean(figures, 'greedy'):.3f}",
        f"{_mean(figures, 'pass_at_n'):.3f}",
    ]
    if "seconds" not in figures[0]:  # the start, before any training
        return [*scores, *("·" for _ in HEADINGS[len(scores) :])]
    return [
        *scores,
        f"{_mean(figures, 'entropy'):.2f}",
        f"{_mean(figures, 'clipped'):.1%}",
        f"{max(f['mismatch'] for f in figures):.0e}",
        f"{_mean(figures, 'seconds'):.0f}",
        f"{_mean(figures, 'cpu_seconds'):.0f}",
        str(len(figures)) if len(figures) >= SEEDS else f"{len(figures)} of {SEEDS}",
    ]


def _mean(figures: Sequence[Figures], name: str) -> float:
    return statistics.mean(f[name] for f in figures)


def _of(results: Results, row: Row) -> list[Figures]:
    return [results.of(row.name, seed) for seed in results.seeds(row.name)]


def lines(results: Results, rows: Sequence[Row]) -> list[str]:
    """Returns the aligned table for a terminal."""
    body = [("start", cells([results.start] if results.start else []))]
    for kind, of_kind in groupby(rows, key=lambda row: row.kind):
        body += [(f"{kind}:", []), *((f"  {row.name}", cells(_of(results, row))) for row in of_kind)]
    table = [("", list(HEADINGS)), *body]
    names = max(len(name) for name, _ in table)
    widths = [max(len(row[i]) for _, row in table if row) for i in range(len(HEADINGS))]
    return [
        f"{name.ljust(names)}  {'  '.join(cell.rjust(w) for cell, w in zip(row, widths, strict=False))}".rstrip()
        for name, row in table
    ]


def markdown(results: Results, rows: Sequence[Row]) -> str:
    """Returns the table for the page, with a part for each kind of row."""
    parts = []
    for kind, of_kind in groupby(rows, key=lambda row: row.kind):
        table = [("*start*", cells([results.start] if results.start else []))]
        table += [(f"`{row.name}`" if " " not in row.name else row.name, cells(_of(results, row))) for row in of_kind]
        head = [f"| {kind} | {' | '.join(HEADINGS)} |", f"|---|{'---|' * len(HEADINGS)}"]
        parts.append("\n".join([*head, *(f"| {name} | {' | '.join(row_cells)} |" for name, row_cells in table)]))
    return "\n\n".join(parts)


def write_page(results: Results, rows: Sequence[Row], page: Path) -> None:
    """Writes the table into the page, between the two marks."""
    before, rest = page.read_text().split(BEGIN)
    after = rest.split(END)[1]
    page.write_text(f"{before}{BEGIN}\n\n{markdown(results, rows)}\n\n{END}{after}")
