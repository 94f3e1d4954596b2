"""What one value may be, as a test and in words. The schema's keys and the options of environments are ruled by it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from skyrl_mega.config.outside import is_unicode
from skyrl_mega.config.secrets import hidden
from skyrl_mega.config.terminal import printable

WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", list: "a list of text"}
LARGEST = 10**12
"""No number is larger, whatever it counts."""
LONGEST_TEXT = 4000
"""Characters of one text: no path of a file may be longer."""
WIDEST = 80
"""Characters of a value that an error shows."""


@dataclass(frozen=True)
class Rule:
    """A type and a range. NaN and infinity are never allowed, nor is text that no file or terminal can take."""

    type: type
    """int, float (whole numbers too), bool, str, list (of text; of whole numbers where `low` is given) or dict."""
    nullable: bool = False
    low: float | None = None
    high: float | None = None
    above: float | None = None
    """As `low`, and itself not allowed."""
    choices: tuple[str, ...] = ()
    """Texts that are allowed; of a list, for each of its entries."""
    empty: bool = True
    """Whether text, or an entry of a list, may be empty."""

    @property
    def numbers(self) -> bool:
        """Whether it is a list of whole numbers."""
        return self.type is list and self.low is not None

    def allows(self, value: Any) -> bool:
        """Whether it may stand there."""
        return self.nullable if value is None else _TESTS[self.type](self, value)

    @property
    def words(self) -> str:
        """What may stand there."""
        return self._one() + (" or null" if self.nullable else "")

    def refusal(self, value: Any) -> str:
        """What to say of a value that is not allowed."""
        if isinstance(value, Mapping) and self.type is dict:
            return f"allowed is {self.words} without NaN, infinity and broken text"
        beyond = isinstance(value, int | float) and LARGEST < abs(value) < math.inf and self.high is None
        return f"allowed is {self.words}" + (f", and nothing beyond {LARGEST:g}" if beyond else "")

    def _one(self) -> str:
        if self.choices:
            return f"{'a list of' if self.type is list else 'one of'} {', '.join(self.choices)}"
        text = "a list of whole numbers, each" if self.numbers else WORDS.get(self.type, "a mapping")
        if not self.empty:
            text += " that is not empty" if self.type is str else ", none empty"
        if self.above is not None:
            return f"{text} above {_plain(self.above)}" + (f" and at most {_plain(self.high)}" if self.high else "")
        if self.low is None:
            return text
        most = f" to {_plain(self.high)}" if self.high is not None else ""
        return f"{text} from {_plain(self.low)}{most}" if most else f"{text} of at least {_plain(self.low)}"

    def _number(self, value: Any) -> bool:
        kinds = (int, float) if self.type is float else int
        return (
            isinstance(value, kinds)
            and not isinstance(value, bool)
            and -LARGEST <= value <= LARGEST
            and (self.low is None or value >= self.low)
            and (self.high is None or value <= self.high)
            and (self.above is None or value > self.above)
        )

    def _text(self, value: Any) -> bool:
        fits = isinstance(value, str) and len(value) <= LONGEST_TEXT and "\0" not in value and is_unicode(value)
        return fits and (self.empty or value != "") and (not self.choices or value in self.choices)

    def _list(self, value: Any) -> bool:
        return isinstance(value, list | tuple) and all(map(self._number if self.numbers else self._text, value))

    def _mapping(self, value: Any) -> bool:
        return isinstance(value, Mapping) and all(map(_is_plain, _leaves(value)))


_TESTS: Mapping[type, Callable[[Rule, Any], bool]] = {
    int: Rule._number,
    float: Rule._number,
    str: Rule._text,
    list: Rule._list,
    bool: lambda rule, value: isinstance(value, bool),
    dict: Rule._mapping,
}


def shown(value: Any) -> str:
    """A value as YAML writes it, on one line and not too long; control characters as escapes."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    try:
        text = yaml.safe_dump(value, default_flow_style=True, width=10**9, allow_unicode=True)
    except (yaml.YAMLError, RecursionError):  # nothing that YAML has a form for
        text = ascii(value)
    text = hidden(text, short=True)
    text = printable(" ".join(text.removesuffix("\n").removesuffix("\n...").split()))
    return text if len(text) <= WIDEST else text[: WIDEST - 1] + "…"


def _plain(number: float) -> str:
    return str(int(number)) if number == int(number) else f"{number:g}"


def _leaves(value: Any) -> Iterator[Any]:
    """Keys and values of nested mappings and lists."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple):
            waiting += value
        else:
            yield value


def _is_plain(value: Any) -> bool:
    """Whether it is a finite number, a text, true, false or null."""
    if isinstance(value, float):
        return math.isfinite(value)
    return (
        value is None or isinstance(value, int) or (isinstance(value, str) and "\0" not in value and is_unicode(value))
    )
