"""Sanitizing of text for terminals: no control sequence of any source reaches a terminal."""

from __future__ import annotations


def printable(text: str, keep: str = "") -> str:
    """Returns the text with control, format and broken characters escaped (`\\x1b`), except the characters in
    `keep`."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)


def one_line(text: str, most: int = 4000) -> str:
    """Returns the text as a single line for a terminal, shortened to at most `most` characters.

    Joins lines and repeated spaces by a single space, and escapes control characters.
    """
    text = printable(" ".join(text.split()))
    return text if len(text) <= most else text[: most - 1] + "…"
