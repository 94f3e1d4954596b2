"""Finding the answer in a solution."""

from __future__ import annotations

import re

TAIL = 300
"""Characters at the end of a solution in which DAPO looks for the answer."""


def last_boxed(text: str) -> tuple[int, str] | None:
    """Where the last `\\boxed{…}` with balanced braces begins, and what is in it."""
    boxes = list(re.finditer(r"\\(?:boxed|fbox)[ \t]*\{", text))
    if not boxes:
        return None
    start, inside = boxes[-1].span()
    depth = 1
    for at in range(inside, len(text)):
        depth += (text[at] == "{") - (text[at] == "}")
        if depth == 0:
            return start, text[inside:at]
    return None


def last_line(text: str) -> tuple[int, str] | None:
    """Where the last `Answer: …` begins, and the rest of its line; capitals and `**` around do not matter."""
    lines = list(re.finditer(r"(?i)answer(?:\*\*|__)?\s*:(?:\*\*|__)?[ \t]*([^\n]+)", text))
    return (lines[-1].start(), lines[-1].group(1).strip().strip("*").strip()) if lines else None


def dapo(text: str) -> str | None:
    """What DAPO's published grader takes: what follows the last `Answer:` up to the end of its line or a `<`."""
    found = re.findall(r"(?i)answer\s*:\s*([^\n<]+)", text)
    return found[-1] if found else None


def extract(text: str, form: str) -> str | None:
    """The answer in a solution; None where there is none.

    Args:
        text: The solution, or its end.
        form: `boxed`, the last `\\boxed{…}`; `line`, the last `Answer:` line; `either`, the later of the two. A box on
            the line is opened. `dapo`, where the grader that DAPO and SkyRL published finds it.
    """
    if form == "dapo":
        return dapo(text)
    found = {"boxed": [last_boxed(text)], "line": [last_line(text)], "either": [last_boxed(text), last_line(text)]}
    places = [place for place in found[form] if place is not None]
    if not places:
        return None
    _, answer = max(places)
    inner = last_boxed(answer)
    return inner[1] if inner else answer
