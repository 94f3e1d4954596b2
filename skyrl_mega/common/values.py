"""Rules for a single value, as a test and in words, for the schema's keys and for the options of environments."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from skyrl_mega.common.safe_read import is_unicode
from skyrl_mega.common.secrets import hidden
from skyrl_mega.common.terminal import printable

WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", list: "a list of text"}
LARGEST = 10**12
"""Upper bound of every number, independent of the meaning."""
LONGEST_TEXT = 4000
"""Maximum characters of a text value; no file path may be longer."""
WIDEST = 80
"""Maximum characters of a value in an error message."""


@dataclass(frozen=True)
class Rule:
    """Type and range of a value. NaN, infinity and text not valid in files or terminals are never allowed."""

    type: type
    """int, float (also accepts whole numbers), bool, str, list (of text, or of whole numbers if `low` is given) or
    dict."""
    nullable: bool = False
    low: float | None = None
    high: float | None = None
    above: float | None = None
    """Exclusive lower bound."""
    choices: tuple[str, ...] = ()
    """Allowed texts; for a list, the allowed entries."""
    empty: bool = True
    """True if text, or an entry of a list, may be empty."""
    mappings: bool = False
    """True for a list of mappings instead of text."""

    @property
    def numbers(self) -> bool:
        """True for a list of whole numbers, as opposed to a list of text: `type` is list and `low` is given."""
        return self.type is list and self.low is not None

    def allows(self, value: Any) -> bool:
        """Returns True if the value has the rule's type and range; None is allowed only if `nullable`. Booleans are no
        numbers, and a tuple counts as a list."""
        return self.nullable if value is None else _TESTS[self.type](self, value)

    @property
    def words(self) -> str:
        """Description of the valid values, such as `a number from 0 to 1 or null`."""
        return self._describe() + (" or null" if self.nullable else "")

    def refusal(self, value: Any) -> str:
        """Returns the part of an error message after a rejected value, such as `allowed is a number from 0 to 1`.

        Args:
            value: The rejected value; it is not tested again.
        """
        if isinstance(value, Mapping) and self.type is dict:
            return f"allowed is {self.words} without NaN, infinity and broken text"
        beyond = isinstance(value, int | float) and LARGEST < abs(value) < math.inf and self.high is None
        return f"allowed is {self.words}" + (f", and nothing beyond {LARGEST:g}" if beyond else "")

    def _describe(self) -> str:
        if self.choices:
            return f"{'a list of' if self.type is list else 'one of'} {', '.join(self.choices)}"
        text = "a list of whole numbers, each" if self.numbers else WORDS.get(self.type, "a mapping")
        if self.mappings:
            return "a list of mappings"
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
        if self.mappings:
            return isinstance(value, list | tuple) and all(isinstance(e, Mapping) and self._mapping(e) for e in value)
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
    """Returns a value as a line of YAML of at most `WIDEST` characters, without control characters. Hides only secrets
    remembered by `secrets` (`hidden`); for others, call `masked` first."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    try:
        text = yaml.safe_dump(value, default_flow_style=True, width=10**9, allow_unicode=True)
    except (yaml.YAMLError, RecursionError):  # YAML cannot represent this value
        text = ascii(value)
    text = hidden(text, short=True)
    text = printable(" ".join(text.removesuffix("\n").removesuffix("\n...").split()))
    return text if len(text) <= WIDEST else text[: WIDEST - 1] + "…"


def _plain(number: float) -> str:
    return str(int(number)) if number == int(number) else f"{number:g}"


def _leaves(value: Any) -> Iterator[Any]:
    """Yields keys and values of nested mappings and lists."""
    pending = [value]
    while pending:
        value = pending.pop()
        if isinstance(value, Mapping):
            pending += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple):
            pending += value
        else:
            yield value


def _is_plain(value: Any) -> bool:
    """Returns True for a finite number, a valid text, a boolean or None."""
    if isinstance(value, float):
        return math.isfinite(value)
    return (
        value is None or isinstance(value, int) or (isinstance(value, str) and "\0" not in value and is_unicode(value))
    )
