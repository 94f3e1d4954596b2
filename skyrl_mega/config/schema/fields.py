"""Fields that carry their allowed values in their metadata, so that a rule stands beside the key it rules."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def one_of(*allowed: str, former: dict[bool, str] | None = None) -> Any:
    """A string field; the first of `allowed` is the default. `former`: what true and false are taken for, where the
    setting was a switch once."""
    return field(default=allowed[0], metadata={"allowed": allowed, "former": former or {}})


def at_least(low: float, default: Any) -> Any:
    """A number field that is never below `low`."""
    return field(default=default, metadata={"low": low})


def between(low: float, high: float, default: Any) -> Any:
    """A number field within the closed interval `[low, high]`."""
    return field(default=default, metadata={"low": low, "high": high})


MOST = 100_000
"""Processes, nodes or samples: no run has more."""
