"""Expressions that algebra could not finish, told by a look at the text: nobody waits for them."""

from __future__ import annotations

import re

POWER = 10_000
"""Largest exponent of a number."""
FACTORIAL = 1000
"""Largest number before a `!` or in a binomial."""
SUM_POWER = 64
"""Largest exponent of what stands in brackets: algebra may multiply it out."""
DEPTH = 20


def refused(text: str) -> bool:
    """Whether an expression is a tower of powers, a huge factorial, or nested too deep."""
    if _depth(text) > DEPTH or re.search(r"!\s*!|\^\s*\w+\s*\^", text):
        return True
    if any(_large_group(text, match.start()) for match in re.finditer(r"[)}]\s*!", text)):
        return True
    if any(int(found) > FACTORIAL for found in re.findall(r"(\d{1,300})\s*!", text)):
        return True
    if "\\binom" in text and any(int(found) > FACTORIAL for found in re.findall(r"\d+", text)):
        return True
    return any(_large(base, exponent) for base, exponent in _powers(text))


def _large_group(text: str, end: int) -> bool:
    """Whether the factorial of what is in brackets may be huge: `(n+1)!` is not, `(3!)!` and `(9^9)!` are."""
    depth = 0
    for start in range(end, -1, -1):
        depth += (text[start] in ")}") - (text[start] in "({")
        if depth == 0:
            group = text[start : end + 1]
            small = all(len(found) <= 2 for found in re.findall(r"\d+", group))
            return not small or not re.search(r"[a-z]", group) or "!" in group or "^" in group
    return True


def _powers(text: str) -> list[tuple[str, str]]:
    """The letter before each `^`, and the exponent."""
    found = []
    for match in re.finditer(r"\^\s*", text):
        start = match.end()
        exponent = text[start : start + 1]
        if exponent in ("{", "("):
            exponent = text[start + 1 : _closed(text, start)]
        before = text[: match.start()].rstrip()
        found.append((before[-1:], exponent))
    return found


def _large(base: str, exponent: str) -> bool:
    if "!" in exponent or exponent.count("^") > 1:
        return True
    if "^" in exponent:  # a tower of two: n^{2^k} is small, 9^{9^9} is not
        numbers = [int(found) for found in re.findall(r"\d+", exponent)]
        return bool(numbers) and (len(numbers) > 2 or max(numbers) > 13 or numbers[0] ** numbers[-1] > POWER)
    numbers = [int(found[:9]) for found in re.findall(r"\d+", exponent)]
    product = 1
    for value in numbers:
        product *= max(1, value)
    return product > (SUM_POWER if base in (")", "}", "]") else POWER)


def _closed(text: str, start: int) -> int:
    depth = 0
    for at in range(start, len(text)):
        depth += (text[at] in "({") - (text[at] in ")}")
        if depth == 0:
            return at
    return len(text)


def _depth(text: str) -> int:
    depth = most = 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        most = max(most, depth)
    return most
