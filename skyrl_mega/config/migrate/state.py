"""State of a translation in progress, for conversions that need several settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from skyrl_mega.common.values import shown
from skyrl_mega.config.keys import keys
from skyrl_mega.config.migrate.account import AccountRow, Migration
from skyrl_mega.config.migrate.given import Given, GivenSettings
from skyrl_mega.config.migrate.rules import rules

KEEP = "residency.keep"
"""Our setting changed by several switches of other programs; every switch may remove parts from the list."""


class TranslationState:
    """State of a translation: given settings, and the translation so far.

    Args:
        reading: The input. Only the last value of a repeated key is translated; earlier values get a row `dropped`.
    """

    def __init__(self, reading: GivenSettings) -> None:
        """Indexes the given settings by key."""
        self.program, self.reading = reading.program, reading
        self.rules = rules(reading.program)
        self.migration = Migration(reading.program, assumptions=list(reading.assumptions), inherited=reading.inherited)
        self.migration.to_add += reading.missing
        self.given: dict[str, Given] = {}
        """Settings of the other program by key; the last value if a key is given again."""
        for given in reading.settings:
            if given.key in self.given:
                why = f"given again: {shown(given.value)} holds"
                self.migration.rows.append(AccountRow("dropped", given.key, self.given[given.key].value, why=why))
            self.given[given.key] = given
        self.origins: dict[str, tuple[str, bool]] = {}
        """Our setting → the key that set it, and True if that key was given."""

    def ours(self, key: str) -> Any:
        """Returns the value of a setting of this project: translated so far, or our default; None for an unknown key.

        Args:
            key: Dotted key of this project.
        """
        return self.migration.settings.get(key, keys()[key].default if key in keys() else None)

    def theirs(self, key: str) -> Any:
        """Returns the value of a key of the other program: given, or the program's default; None without either.

        A given value that could not be read without a shell or Python counts as not given.
        """
        if key in self.given and not self.given[key].unresolved:
            return self.given[key].value
        switch = self.rules.switches.get(key)
        return self.rules.defaults.get(key, switch.default if switch else None)

    def consume(self, key: str, kind: str, ours: Mapping[str, Any], why: str = "") -> None:
        """Sets our settings for a given key, and adds the key's row to the account; does nothing if it is not given.

        For keys with a translation from several settings, beside the table. Settings made by another given key stay.

        Args:
            key: Key of the other program.
            kind: Outcome, from `account.KINDS`.
            ours: Settings of this project with values.
            why: Reason for the account.
        """
        if key in self.given:
            rows = self.migration.rows  # a key outside of the table was called unknown before
            rows[:] = [row for row in rows if (row.kind, row.theirs) != ("unknown", key)]
            self.place(key, ours, given=True)
            rows.append(AccountRow(kind, key, self.given[key].value, dict(ours), why))

    def place(self, origin: str, ours: Mapping[str, Any], *, given: bool) -> list[str]:
        """Sets our settings; returns the settings that keep another value, from a key that was given before.

        Args:
            origin: Key of the other program, or a description of its default.
            ours: Settings of this project with values.
            given: True if the key was given; later keys do not change its settings.
        """
        kept = []
        settings = self.migration.settings
        for key, value in ours.items():
            if key == KEEP and key in settings:
                settings[key] = shorter(settings[key], value)
            elif key in settings and settings[key] != value and self.origins[key][1]:
                kept.append(key)
                continue
            else:
                settings[key] = value
            self.origins[key] = (origin, given)
        return kept


def shorter(left: Sequence[str] | None, right: Sequence[str] | None) -> list[str] | None:
    """Returns the parts that stay under both switches, in the order of `left`. None stands for all parts."""
    if left is None or right is None:
        kept = left if right is None else right
        return None if kept is None else list(kept)
    return [part for part in left if part in right]
