"""Sanitizing of text for terminals: no control sequence of any source reaches a terminal."""

from __future__ import annotations


def printable(text: str, keep: str = "") -> str:
    """Returns the text with all characters refused by `str.isprintable` escaped (`\\x1b`), except the characters in
    `keep`.

    `isprintable` refuses control, format, private, unassigned and broken characters, tabs and line breaks, and every
    space other than ` `, such as U+00A0 and U+3000. A backslash stays.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)


def one_line(text: str, most: int = 4000) -> str:
    """Returns the text as a single line for a terminal, shortened to at most `most` characters, with `…` as the last of
    them in a shortened text.

    Replaces each run of white space (spaces of any kind, tabs, line breaks) by a single space, without any at the ends,
    and escapes the remaining characters refused by `str.isprintable`.
    """
    text = printable(" ".join(text.split()))
    return text if len(text) <= most else text[: most - 1] + "…"
