"""Tags in a policy's text, found in linear time.

A looping policy writes the same opening tag thousands of times. A regular expression that searches for the closing tag
from each opening tag takes quadratic time, and holds the interpreter lock meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Tag(NamedTuple):
    """A closed pair of tags: `<name>text</name>`."""

    name: str
    text: str
    """Text between the tags."""
    start: int
    """Position of the opening tag in the whole text."""


def first_tag(text: str, *names: str) -> Tag | None:
    r"""Returns the closed pair of tags in a text with the earliest opening tag among `names`: `<(a|b)>(.*?)</\1>`; None
    if there is none."""
    tags = [tag for name in names if (tag := next(all_tags(text, name), None))]
    return min(tags, key=lambda tag: tag.start, default=None)


def all_tags(text: str, name: str) -> Iterator[Tag]:
    """Yields the tags `<name>…</name>` of a text, in order. A tag ends at the first `</name>`; a tag that is not closed
    ends the search."""
    opening, closing, at = f"<{name}>", f"</{name}>", 0
    while (start := text.find(opening, at)) >= 0:
        inner = start + len(opening)
        end = text.find(closing, inner)
        if end < 0:  # an unclosed tag here means no later tag is closed
            return
        yield Tag(name, text[inner:end], start)
        at = end + len(closing)


def first_boxed(text: str) -> str | None:
    r"""Returns the content of the first non-empty `\boxed{…}`, up to the next closing brace: `\\boxed\{([^}]+)\}`. None
    without such a box."""
    opening, at = "\\boxed{", 0
    while (start := text.find(opening, at)) >= 0:
        at = start + len(opening)
        end = text.find("}", at)
        if end < 0:
            return None
        if end > at:
            return text[at:end]
    return None
