"""Declared options of an environment or a tracker (`environment.options.<name>`, `telemetry.options.<name>`), checked
before a run starts.

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

from skyrl_mega.common.errors import UserError
from skyrl_mega.common.values import Rule, shown


@dataclass(frozen=True)
class Option:
    """A single option: default value, rule of valid values, documentation."""

    default: Any
    rule: Rule
    doc: str
    inner: Mapping[str, Option] | None = None
    """Options of a group; None for a single value."""


def number(
    default: float | None,
    doc: str,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
) -> Option:
    """Returns the declaration of a finite number; nullable if the default is None.

    Args:
        default: The default.
        doc: Documentation for the user.
        low, high: Allowed range, bounds included; None sets no bound.
        above: Exclusive lower bound; None sets no bound.
    """
    return Option(default, Rule(float, default is None, low, high, above), doc)


def whole(default: int | None, doc: str, *, low: int, high: int = 10**9) -> Option:
    """Returns the declaration of a whole number from `low` to `high` (included); nullable if the default is None. `doc`
    is the documentation for the user."""
    return Option(default, Rule(int, default is None, low, high), doc)


def switch(default: bool, doc: str) -> Option:
    """Returns the declaration of a boolean option. `doc` is the documentation for the user."""
    return Option(default, Rule(bool), doc)


def text(default: str | None, doc: str, *, empty: bool = False) -> Option:
    """Returns the declaration of a text; nullable if the default is None, empty only with `empty`. `doc` is the
    documentation for the user."""
    return Option(default, Rule(str, default is None, empty=empty), doc)


def choice(*allowed: str, doc: str) -> Option:
    """Returns the declaration of a text with a fixed set of values; the first is the default. At least one value is
    given. `doc` is the documentation for the user."""
    return Option(allowed[0], Rule(str, choices=allowed), doc)


def texts(default: list[str], doc: str, *, choices: tuple[str, ...] = ()) -> Option:
    """Returns the declaration of a list of non-empty texts; with `choices`, only these texts are allowed. `doc` is the
    documentation for the user."""
    return Option(default, Rule(list, choices=choices, empty=False), doc)


def mapping(doc: str) -> Option:
    """Returns the declaration of a mapping passed to another library, with keys unchecked; empty by default. `doc` is
    the documentation for the user."""
    return Option({}, Rule(dict), doc)


def group(inner: Mapping[str, Option], doc: str) -> Option:
    """Returns the declaration of a group of options: a mapping with the options in `inner`, completed by defaults.
    `doc` is the documentation for the user."""
    return Option({}, Rule(dict), doc, inner)


def filled(key: str, given: Any, declared: Mapping[str, Option] | None) -> dict[str, Any]:
    """Checks options given by the user and returns all declared options in a new dict, with defaults for missing
    options.

    Args:
        key: Name of the setting with the options, for errors: `environment.options.math`.
        given: Value of the setting; None counts as no options.
        declared: Declared options; None accepts any option.

    Raises:
        UserError: An option is not declared, or a value violates the option's rule.
    """
    if given is not None and not isinstance(given, Mapping):
        raise UserError(f"allowed is {_describe(declared)}", key=key, value=shown(given))
    if declared is None:
        return dict(given or {})
    for name in given or {}:
        if name not in declared:
            near = get_close_matches(str(name), declared, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise UserError(
                f"there is no such option; {hint}allowed is {_describe(declared)}", key=f"{key}.{shown(name)}"
            )
    return {
        name: _checked(f"{key}.{name}", (given or {}).get(name, option.default), option)
        for name, option in declared.items()
    }


def _checked(key: str, value: Any, option: Option) -> Any:
    if option.inner is not None:
        return filled(key, value, option.inner)
    if not option.rule.allows(value):
        raise UserError(option.rule.refusal(value), key=key, value=shown(value))
    return value


def _describe(declared: Mapping[str, Option] | None) -> str:
    if declared is None:
        return "a mapping of options"
    return f"a mapping of {', '.join(declared)}" if declared else "none: it has no options"
