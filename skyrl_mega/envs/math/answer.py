"""Extraction of the answer from a solution."""

from __future__ import annotations

import re

TAIL = 300
"""Length of the end of a solution searched for the answer by DAPO, in characters."""


def last_boxed(text: str) -> tuple[int, str] | None:
    r"""Returns the position and the content of the last `\boxed{…}` or `\fbox{…}` in a text; None if there is none, or
    if this last one lacks a closing brace."""
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
    """Returns the position of the last `Answer: …` in a text and the rest of its line; None without such a line.
    Ignores case and surrounding `**`."""
    lines = list(re.finditer(r"(?i)answer(?:\*\*|__)?\s*:(?:\*\*|__)?[ \t]*([^\n]+)", text))
    return (lines[-1].start(), lines[-1].group(1).strip().strip("*").strip()) if lines else None


def dapo(text: str) -> str | None:
    """Returns the answer found by DAPO's published grader: the text after the last `Answer:`, up to the end of the line
    or a `<`; None without any.
    """
    matches = re.findall(r"(?i)answer\s*:\s*([^\n<]+)", text)
    return matches[-1] if matches else None


def extract(text: str, form: str) -> str | None:
    """Returns the answer in a solution; None if there is none.

    Args:
        text: The solution, or its end.
        form: `boxed`, the last `\\boxed{…}`; `line`, the last `Answer:` line; `either`, the later of the two. A box on
            the line is opened. `dapo`, the answer found by the published grader of DAPO and SkyRL.
    """
    if form == "dapo":
        return dapo(text)
    by_form = {"boxed": [last_boxed(text)], "line": [last_line(text)], "either": [last_boxed(text), last_line(text)]}
    candidates = [candidate for candidate in by_form[form] if candidate is not None]
    if not candidates:
        return None
    _, answer = max(candidates)
    inner = last_boxed(answer)
    return inner[1] if inner else answer
