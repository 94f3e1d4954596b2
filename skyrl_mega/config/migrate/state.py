"""Interface of a translation in progress, for conversions that need several settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from skyrl_mega.config.migrate.account import Migration
from skyrl_mega.config.migrate.given import Given, GivenSettings


class TranslationState(Protocol):
    """State of a translation: given settings, and the translation so far."""

    program: str
    """Name of the other program."""
    reading: GivenSettings
    """The input of the translation."""
    given: dict[str, Given]
    """Settings of the other program by key; the last value if a key is given again."""
    migration: Migration
    """The result so far."""

    def ours(self, key: str) -> Any:
        """Returns the value of a setting of this project: translated so far, or our default; None for an unknown key.

        Args:
            key: Dotted key of this project.
        """

    def theirs(self, key: str) -> Any:
        """Returns the value of a key of the other program: given, or the program's default; None without either.

        A given value that could not be read without a shell or Python counts as not given.
        """

    def consume(self, key: str, kind: str, ours: Mapping[str, Any], why: str = "") -> None:
        """Sets our settings for a given key, and adds the key's row to the account; does nothing if it is not given.

        For keys with a translation from several settings, beside the table. Settings made by another given key stay.

        Args:
            key: Key of the other program.
            kind: Outcome, from `account.KINDS`.
            ours: Settings of this project with values.
            why: Reason for the account.
        """
