"""Tables of text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], left: int = 1, indent: str = "  ") -> list[str]:
    """Returns lines with columns as wide as the longest cell, each line behind `indent`; the first `left` columns are
    left-aligned, the others right-aligned. There is at least one row (else IndexError), and all have as many cells
    (else ValueError or IndexError)."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = (
        "  ".join(c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    )
    return [f"{indent}{line.rstrip()}" for line in lines]
