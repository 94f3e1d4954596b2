"""What one value may be, as a test and in words. The schema's keys and the options of environments are ruled by it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", list: "a list of text"}
LONGEST_TEXT = 4000
"""Characters of one text: no path of a file may be longer."""
WIDEST = 80
"""Characters of a value that an error shows."""


@dataclass(frozen=True)
class Rule:
    """A type and a range. NaN and infinity are never allowed, nor is text that no file or terminal can take."""

    type: type
    """int, float (whole numbers too), bool, str, list (of text) or dict."""
    nullable: bool = False
    low: float | None = None
    high: float | None = None
    above: float | None = None
    """As `low`, and itself not allowed."""
    choices: tuple[str, ...] = ()
    """Texts that are allowed; of a list, for each of its entries."""
    empty: bool = True
    """Whether text, or an entry of a list, may be empty."""

    def allows(self, value: Any) -> bool:
        """Whether it may stand there."""
        return self.nullable if value is None else _TESTS[self.type](self, value)

    @property
    def words(self) -> str:
        """What may stand there."""
        return self._one() + (" or null" if self.nullable else "")

    def _one(self) -> str:
        if self.choices:
            return f"{'a list of' if self.type is list else 'one of'} {', '.join(self.choices)}"
        text = WORDS.get(self.type, "a mapping")
        if not self.empty:
            text += " that is not empty" if self.type is str else ", none empty"
        if self.above is not None:
            return f"{text} above {self.above:g}" + (f" and at most {self.high:g}" if self.high is not None else "")
        if self.high is not None:
            return f"{text} from {self.low:g} to {self.high:g}" if self.low is not None else f"{text} to {self.high:g}"
        return f"{text} of at least {self.low:g}" if self.low is not None else text

    def _number(self, value: Any) -> bool:
        kinds = int if self.type is int else (int, float)
        return (
            isinstance(value, kinds)
            and not isinstance(value, bool)
            and math.isfinite(value)
            and (self.low is None or value >= self.low)
            and (self.high is None or value <= self.high)
            and (self.above is None or value > self.above)
        )

    def _text(self, value: Any) -> bool:
        fits = isinstance(value, str) and len(value) <= LONGEST_TEXT and "\0" not in value and _is_unicode(value)
        return fits and (self.empty or value != "") and (not self.choices or value in self.choices)

    def _list(self, value: Any) -> bool:
        return isinstance(value, list | tuple) and all(map(self._text, value))


_TESTS: Mapping[type, Callable[[Rule, Any], bool]] = {
    int: Rule._number,
    float: Rule._number,
    str: Rule._text,
    list: Rule._list,
    bool: lambda rule, value: isinstance(value, bool),
    dict: lambda rule, value: isinstance(value, Mapping),
}


def shown(value: Any) -> str:
    """A value as YAML writes it, on one line and not too long; control characters as escapes."""
    try:
        text = yaml.safe_dump(value, default_flow_style=True, width=10**9, allow_unicode=True)
    except (yaml.YAMLError, RecursionError):  # nothing that YAML has a form for
        text = ascii(value)
    text = " ".join(text.removesuffix("\n").removesuffix("\n...").split())
    return text if len(text) <= WIDEST else text[: WIDEST - 1] + "…"


def _is_unicode(text: str) -> bool:
    """Whether it has no half of a surrogate pair, which no file takes."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
