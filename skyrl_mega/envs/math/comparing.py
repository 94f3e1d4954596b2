"""Comparison of two readings, kind by kind and part by part; algebra is used only for two expressions."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from .forms import unfinished
from .reading import Reading
from .units import agree

AlgebraCheck = Callable[[str, str], bool]
"""Function that decides by algebra if two expressions are equal."""

ORDERED = ("tuple", "ratio", "matrix", "relation")
"""Kinds whose parts are compared in order."""
UNORDERED = ("list", "union")
"""Kinds whose parts are compared in any order."""
MOST_PARTS = 64
"""Maximum number of parts to compare; longer answers count as different."""


def matches(gold: Reading, answer: Reading, ask: AlgebraCheck) -> bool:
    """Returns True if an answer means the same as the gold answer.

    Args:
        gold: Reading of the right answer.
        answer: Reading of the answer to check.
        ask: Returns True if two expressions are equal by algebra.
    """
    if not agree(gold.unit, answer.unit):
        return False
    if "named" in (gold.kind, answer.kind):
        return _same_names(gold, answer, ask)
    if "equation" in (gold.kind, answer.kind) or (gold.symbol and answer.symbol and gold.symbol != answer.symbol):
        return _same_equation(gold, answer, ask)
    if gold.kind in ("number", "expression") and answer.kind in ("number", "expression"):
        if gold.value is not None and answer.value is not None:
            return gold.value == answer.value
        return not unfinished(gold, answer) and (gold.text == answer.text or ask(gold.text, answer.text))
    if gold.kind != answer.kind:
        text_kinds = ("words", "name", "expression", "opaque", "base")
        return gold.kind in text_kinds and answer.kind in text_kinds and gold.text == answer.text != ""
    if gold.kind not in (*ORDERED, *UNORDERED):
        return gold.text == answer.text != ""
    if gold.shape != answer.shape or len(gold.parts) != len(answer.parts) or len(gold.parts) > MOST_PARTS:
        return False
    if gold.kind in ORDERED:
        return all(matches(one, other, ask) for one, other in zip(gold.parts, answer.parts, strict=True))
    return _same_parts(gold.parts, answer.parts, ask)


def _same_parts(gold: Sequence[Reading], answer: Sequence[Reading], ask: AlgebraCheck) -> bool:
    """Returns True if the parts match one to one in any order. Parts equal without algebra are paired first."""
    unmatched = list(answer)
    for equal in (_never, ask):
        missing = []
        for part in gold:
            match = next((other for other in unmatched if matches(part, other, equal)), None)
            if match is None:
                missing.append(part)
            else:
                unmatched.remove(match)
        gold = missing
    return not gold and not unmatched


def _same_names(gold: Reading, answer: Reading, ask: AlgebraCheck) -> bool:
    """Compares parts by name; if a side is without names, in the order of the other side."""
    if gold.kind == answer.kind:
        by_symbol = {part.symbol: part for part in answer.parts}
        parts = [by_symbol.get(part.symbol) for part in gold.parts]
    else:
        other = gold if answer.kind == "named" else answer
        plain = not any(reading.symbol for reading in (other, *other.parts))
        ordered = other.kind == "list" or other.shape == "()"
        parts = list(answer.parts) if plain and ordered else []
    if len(gold.parts) != len(answer.parts) or len(parts) != len(gold.parts):
        return False
    return all(
        other is not None and matches(replace(one, symbol=""), replace(other, symbol=""), ask)
        for one, other in zip(gold.parts, parts, strict=True)
    )


def _same_equation(gold: Reading, answer: Reading, ask: AlgebraCheck) -> bool:
    one, other = _difference(gold), _difference(answer)
    if one is None or other is None:
        return False
    if not gold.symbol and not answer.symbol and gold.text == answer.text:
        return True
    return ask(one, other) or ask(one, f"-({other})")


def _difference(reading: Reading) -> str | None:
    """Returns left side minus right side as text; None if the reading is not an equation."""
    if reading.kind == "equation":
        return f"{reading.parts[0].text}-({reading.parts[1].text})"
    if re.fullmatch(r"[A-Za-z]", reading.symbol) and reading.kind in ("number", "expression"):
        return f"{reading.symbol}-({reading.text})"
    return None


def _never(one: str, other: str) -> bool:
    return False
