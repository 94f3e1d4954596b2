"""What every target is: how a case is drawn, how it is fed, and how it may end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from skyrl_mega.config.errors import UserError


def nothing() -> None:
    """For a target that needs no preparation."""


@dataclass(frozen=True)
class Target:
    """One reader of something from outside, or one judge."""

    make: Callable[[Random], Any]
    """Draws a case that JSON can hold."""
    run: Callable[[Any, Path], None]
    """Feeds it; the folder is empty and vanishes."""
    errors: tuple[type[Exception], ...] = (UserError,)
    """How a case may end, beside well; one line each."""
    bound_s: float = 20.0
    """A case that takes longer hangs. Wide: the machine may be busy, and limits of environments are seconds."""
    share: float = 1.0
    """Of the time, beside others: more where a case is slow."""
    prepare: Callable[[], None] = nothing
    """Makes what all cases share and what stays until the process ends."""


def one_line(error: Exception) -> None:
    """What a person is told is one line that no terminal is steered by."""
    assert str(error).isprintable() and 0 < len(str(error)) <= 4000, repr(str(error))[:300]
