"""Tables of text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], left: int = 1, indent: str = "  ", ragged: bool = False) -> list[str]:
    """Returns lines with columns as wide as the longest cell, each line behind `indent`; the first `left` columns, and
    with `ragged` the last column, are left-aligned, the others right-aligned. There is at least one row (else
    IndexError), and all have as many cells (else ValueError or IndexError)."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    to_left = [i < left or (ragged and i == len(widths) - 1) for i in range(len(widths))]
    lines = (
        "  ".join(c.ljust(w) if start else c.rjust(w) for c, w, start in zip(row, widths, to_left, strict=True))
        for row in rows
    )
    return [f"{indent}{line.rstrip()}" for line in lines]


def as_ranges(numbers: Sequence[int]) -> str:
    """Returns numbers as text, in ascending order, with consecutive numbers as a range: `0-3,8`; `·` for none."""
    parts: list[list[int]] = []
    for n in sorted(numbers):
        if parts and parts[-1][-1] == n - 1:
            parts[-1].append(n)
        else:
            parts.append([n])
    return ",".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts) or "·"
