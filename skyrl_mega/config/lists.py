"""Checks of list settings."""

from __future__ import annotations

from collections.abc import Sequence

from skyrl_mega.config.errors import UserError
from skyrl_mega.config.values import shown


def check_unique(key: str, given: Sequence[str | int]) -> None:
    """Checks that a list has no duplicate entry.

    Args:
        key: The setting with the list.
        given: The list.

    Raises:
        UserError: An entry is there twice.
    """
    for entry in given:
        if given.count(entry) > 1:
            raise UserError(f"{entry} is there twice", key=key, value=shown(list(given)), fix="give it once")
