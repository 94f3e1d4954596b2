"""Constructors of dataclass fields with the allowed values in the metadata, so that the rule stands next to its key.

Rules between the fields of a group are the group's method `refusals`; rules between groups are in `config/checks/`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Refusal:
    """A refused setting."""

    key: str
    problem: str
    """What is wrong, and what is allowed. The rest is as in `UserError`."""
    fix: str = ""
    value: str | None = None
    """The value as text; "" is not shown, and None stands for the value in the settings."""
    settings: tuple[str, ...] = field(default=(), kw_only=True)
    together: tuple[str, ...] = field(default=(), kw_only=True)


Refusals = Iterator[Refusal | tuple[str, ...]]
"""Refused settings; a tuple has the first two, three or four fields of a `Refusal`."""


def one_of(*allowed: str, former: dict[bool, str] | None = None) -> Any:
    """Returns a dataclass field for a word from `allowed`; the first word is the default.

    Args:
        allowed: The allowed words.
        former: Words for true and false, still accepted for a setting that used to be a boolean.
    """
    return field(default=allowed[0], metadata={"allowed": allowed, "former": former or {}})


def at_least(low: float, default: Any) -> Any:
    """Returns a dataclass field for a number from `low` (included) on, with a default (may be None)."""
    return field(default=default, metadata={"low": low})


def between(low: float, high: float, default: Any) -> Any:
    """Returns a dataclass field for a number from `low` to `high`, both included, with a default (may be None)."""
    return field(default=default, metadata={"low": low, "high": high})


MOST = 100_000
"""Upper bound for numbers of processes, nodes or samples; no run needs more."""


def controlled(key: str, given: Iterable[str], instead: Mapping[str, str | None]) -> Refusals:
    """Yields a refusal for each given option that the run sets itself; nothing without any.

    Args:
        key: The setting with the options.
        given: Names of the given options.
        instead: Option that the run sets → the setting to use instead; None: no such setting.
    """
    for name in given:
        if name in instead:
            fix = f"use {instead[name]}" if instead[name] else "leave it out"
            yield f"{key}.{name}", "the run decides it", fix, ""


def duplicates(key: str, given: Sequence[str | int]) -> Refusals:
    """Yields a refusal for each occurrence of an entry that a list setting contains more than once; nothing without
    any.

    Args:
        key: The setting.
        given: The entries.
    """
    for entry in given:
        if given.count(entry) > 1:
            yield key, f"{entry} is listed twice", "give it once"
