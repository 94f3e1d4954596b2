"""Text that people read: whatever it came from, nothing in it steers a terminal."""

from __future__ import annotations


def printable(text: str, keep: str = "") -> str:
    """The text with control, format and broken characters written out (`\\x1b`), but those of `keep`."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)


def one_line(text: str, most: int = 4000) -> str:
    """The text on one line, at most so long."""
    text = printable(" ".join(text.split()))
    return text if len(text) <= most else text[: most - 1] + "…"
