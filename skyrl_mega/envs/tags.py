"""Tags in what a policy wrote, found in linear time.

A policy that loops writes the same opening tag thousands of times. A regular expression that looks for the closing one
from each of them takes time that is quadratic in the text, and holds the interpreter's lock all the while.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Tag(NamedTuple):
    """`<name>text</name>`."""

    name: str
    text: str
    start: int
    """Where it begins."""


def first(text: str, *names: str) -> Tag | None:
    """The pair whose opening tag comes first, of those that are closed; `<(a|b)>(.*?)</\\1>`."""
    found = [tag for name in names if (tag := next(every(text, name), None))]
    return min(found, key=lambda tag: tag.start, default=None)


def every(text: str, name: str) -> Iterator[Tag]:
    """The pairs of one name, one after another; none within another."""
    opening, closing, at = f"<{name}>", f"</{name}>", 0
    while (start := text.find(opening, at)) >= 0:
        inner = start + len(opening)
        end = text.find(closing, inner)
        if end < 0:  # what is not closed here is closed nowhere behind
            return
        yield Tag(name, text[inner:end], start)
        at = end + len(closing)


def first_boxed(text: str) -> str | None:
    """What is in the first `\\boxed{…}` that is not empty, up to the next closing brace; `\\\\boxed\\{([^}]+)\\}`."""
    opening, at = "\\boxed{", 0
    while (start := text.find(opening, at)) >= 0:
        at = start + len(opening)
        end = text.find("}", at)
        if end < 0:
            return None
        if end > at:
            return text[at:end]
    return None
