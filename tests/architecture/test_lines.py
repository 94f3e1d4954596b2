"""Lines of pages: at most 120 characters, except table rows, commands and output."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.architecture.source import ROOT

LONGEST = 120


def long_lines(text: str) -> list[int]:
    """Returns the numbers of too long lines."""
    return [
        number
        for number, line in enumerate(text.splitlines(), 1)
        if len(line) > LONGEST and not line.startswith(("|", "    "))
    ]


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda p: p.name)
def test_lines_of_pages(page: Path) -> None:
    assert long_lines(page.read_text()) == []


def test_a_planted_long_line_is_found() -> None:
    assert long_lines("a\n" + "b" * 121 + "\n| " + "c" * 200 + "\n    " + "d" * 200) == [2]
