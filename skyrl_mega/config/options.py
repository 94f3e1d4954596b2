"""Options of an environment or a tracker (`environment.options.<name>`, `telemetry.options.<name>`): declared once,
checked before a run starts.

OPTIONS = {
    "reward": choice("all", "share", doc="1 when every test passes, or the share of the tests that pass"),
    "timeout_s": number(45.0, above=0, doc="for all tests together"),
}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from skyrl_mega.config.errors import UserError
from skyrl_mega.config.values import Rule, shown


@dataclass(frozen=True)
class Option:
    """One option: what it is where nothing is given, what it may be, and what it does."""

    default: Any
    rule: Rule
    doc: str
    inner: Mapping[str, Option] | None = None
    """Of a group of options: those that it holds."""


def number(
    default: float | None,
    doc: str,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
) -> Option:
    """A number that is finite."""
    return Option(default, Rule(float, default is None, low, high, above), doc)


def whole(default: int | None, doc: str, *, low: int, high: int = 10**9) -> Option:
    """A whole number."""
    return Option(default, Rule(int, default is None, low, high), doc)


def switch(default: bool, doc: str) -> Option:
    """true or false."""
    return Option(default, Rule(bool), doc)


def text(default: str | None, doc: str, *, empty: bool = False) -> Option:
    """Text; None where nothing is usual."""
    return Option(default, Rule(str, default is None, empty=empty), doc)


def choice(*allowed: str, doc: str) -> Option:
    """One of these texts, usually the first."""
    return Option(allowed[0], Rule(str, choices=allowed), doc)


def texts(default: list[str], doc: str, *, choices: tuple[str, ...] = ()) -> Option:
    """A list of text."""
    return Option(default, Rule(list, choices=choices, empty=False), doc)


def mapping(doc: str) -> Option:
    """What another library is given by name; usually nothing."""
    return Option({}, Rule(dict), doc)


def group(inner: Mapping[str, Option], doc: str) -> Option:
    """Options that are named together."""
    return Option({}, Rule(dict), doc, inner)


def filled(key: str, given: Any, declared: Mapping[str, Option] | None) -> dict[str, Any]:
    """All options: what is given, and else what is usual.

    Args:
        key: Where they stand, for errors: `environment.options.math`.
        given: What stands there.
        declared: The options that there are; None takes any.

    Raises:
        UserError: An option that is not declared, or a value that its rule does not allow.
    """
    if given is not None and not isinstance(given, Mapping):
        raise UserError(f"{key} = {shown(given)}: allowed is {_there(declared)}")
    if declared is None:
        return dict(given or {})
    for name in given or {}:
        if name not in declared:
            near = get_close_matches(str(name), declared, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise UserError(f"{key}.{shown(name)}: there is no such option; {hint}allowed is {_there(declared)}")
    return {name: _one(f"{key}.{name}", (given or {}).get(name, of.default), of) for name, of in declared.items()}


def _one(key: str, value: Any, option: Option) -> Any:
    if option.inner is not None:
        return filled(key, value, option.inner)
    if not option.rule.allows(value):
        raise UserError(f"{key} = {shown(value)}: {option.rule.refusal(value)}")
    return value


def _there(declared: Mapping[str, Option] | None) -> str:
    if declared is None:
        return "a mapping of options"
    return f"a mapping of {', '.join(declared)}" if declared else "none: it has no options"
