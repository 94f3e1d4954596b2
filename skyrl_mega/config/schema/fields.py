"""Constructors of dataclass fields with the allowed values in the metadata, so that the rule stands next to its key."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def one_of(*allowed: str, former: dict[bool, str] | None = None) -> Any:
    """Returns a string field; the default is the first of `allowed`. `former`: the meanings of true and false, for a
    setting that used to be a boolean."""
    return field(default=allowed[0], metadata={"allowed": allowed, "former": former or {}})


def at_least(low: float, default: Any) -> Any:
    """Returns a number field with lower bound `low`."""
    return field(default=default, metadata={"low": low})


def between(low: float, high: float, default: Any) -> Any:
    """Returns a number field within the closed interval `[low, high]`."""
    return field(default=default, metadata={"low": low, "high": high})


MOST = 100_000
"""Upper bound for numbers of processes, nodes or samples; no run needs more."""
