"""Checks of list settings."""

from __future__ import annotations

from collections.abc import Sequence

from skyrl_mega.config.errors import UserError
from skyrl_mega.config.values import shown


def check_unique(key: str, given: Sequence[str | int]) -> None:
    """Raises UserError for a duplicate entry."""
    for entry in given:
        if given.count(entry) > 1:
            raise UserError(f"{entry} is there twice", key=key, value=shown(list(given)), fix="give it once")
