"""Interface of a translation in progress, for conversions that need several settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from skyrl_mega.config.migrate.account import Migration
from skyrl_mega.config.migrate.given import Given, GivenSettings


class TranslationState(Protocol):
    """The translation so far."""

    program: str
    reading: GivenSettings
    given: dict[str, Given]
    """Settings of the other program by key; the last value of each."""
    migration: Migration

    def ours(self, key: str) -> Any:
        """Returns the value of one of our settings: translated so far, or our default; None for an unknown
        key."""

    def theirs(self, key: str) -> Any:
        """Returns the value of a key of the other program: given, or the program's default; None without either."""

    def consume(self, key: str, kind: str, ours: Mapping[str, Any], why: str = "") -> None:
        """Accounts for a given key outside of the table's translation; a key that is not given adds nothing."""
