"""The interface of a fuzzing target: generating a case, feeding the case, and the allowed endings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from skyrl_mega.common.errors import UserError


def nothing() -> None:
    """Does nothing: the default preparation."""


@dataclass(frozen=True)
class Target:
    """A reader of external input, or a judge."""

    make: Callable[[Random], Any]
    """Generator of a JSON-compatible case."""
    run: Callable[[Any, Path], None]
    """Function to feed the case; the folder starts empty and is removed afterwards."""
    errors: tuple[type[Exception], ...] = (UserError,)
    """Errors allowed as an ending besides success; a single line each."""
    bound_s: float = 20.0
    """Seconds after which a case counts as a hang. Generous: the machine may be busy, and environments' limits are
    seconds."""
    share: float = 1.0
    """Relative share of time: larger for targets with slow cases."""
    prepare: Callable[[], None] = nothing
    """Function to set up shared state that lasts until the process ends."""


def one_line(error: Exception) -> None:
    """Checks the message of an error: a single line without terminal control characters."""
    assert str(error).isprintable() and 0 < len(str(error)) <= 4000, repr(str(error))[:300]
