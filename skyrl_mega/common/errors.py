"""The error type for wrong user input."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from skyrl_mega.common.secret_names import hide_in_text
from skyrl_mega.common.secrets import hidden
from skyrl_mega.common.terminal import one_line

NO_VALUE: Any = object()
"""Marks an error without a value; None is a value."""


class UserError(Exception):
    """A mistake in user input. Its text is one line: `key = value: problem; fix`.

    The launcher prints the line without a traceback and exits with code 2, before any process has started.

    Attributes:
        problem: What is wrong, and what is allowed.
        key: The setting, option or file with the mistake; empty if the problem names it.
        value: The user's value as text; empty for an error without a value.
        fix: Settings to paste or steps to take; empty if the problem alone says what is allowed.
        settings: Settings besides `key` that could repair the mistake; a search for a fix tries them first.
        together: Two settings that repair the mistake if both change; () if one is enough.
    """

    def __init__(
        self,
        problem: object,
        *,
        key: object = "",
        value: object = NO_VALUE,
        fix: str = "",
        settings: tuple[str, ...] = (),
        together: tuple[str, ...] = (),
    ) -> None:
        super().__init__(problem)
        self.problem, self.key, self.fix = str(problem), str(key), fix
        self.settings, self.together = settings, together
        self.value = "" if value is NO_VALUE else str(value)

    def __str__(self) -> str:
        """Returns the error line, without line breaks, terminal control sequences or secrets."""
        sign = " " if self.key.startswith("--") else " = "
        subject = f"{self.key}{sign}{self.value}" if self.value else self.key
        sentence = "; ".join(filter(None, (self.problem, self.fix)))
        return _printable(": ".join(filter(None, (subject, sentence))))

    @property
    def lines(self) -> list[str]:
        """The error as lines for the terminal: here a list of one line."""
        return [str(self)]

    @property
    def fields(self) -> dict[str, str]:
        """The parts by name, without empty parts and secrets, for JSON output."""
        parts = {"key": self.key, "value": self.value, "problem": self.problem, "fix": self.fix}
        return {name: _printable(text) for name, text in parts.items() if text}

    def with_fix(self, fix: str) -> UserError:
        """Returns a copy of this error with `fix` appended to the present fix, after a semicolon; this error stays
        unchanged. The copy is a `UserError` also for a subclass."""
        fixes = "; ".join(filter(None, (self.fix, fix)))
        return UserError(self.problem, key=self.key, value=self.value or NO_VALUE, fix=fixes)


class UserErrors(UserError):
    """Several mistakes of the same kind, such as unknown keys, reported together with a line each.

    Args:
        mistakes: A complete error line per mistake; equal lines are reported once.
    """

    MOST = 200
    """Maximum number of reported mistakes; a last line gives the number of the remaining mistakes."""

    def __init__(self, mistakes: Iterable[str]) -> None:
        self.mistakes = list(dict.fromkeys(mistakes))
        super().__init__("; ".join(self.mistakes[: self.MOST]))

    @property
    def lines(self) -> list[str]:
        """The error as lines for the terminal: a line per mistake, at most `MOST`, then `and N more`."""
        lines = [str(UserError(mistake)) for mistake in self.mistakes[: self.MOST]]
        more = len(self.mistakes) - self.MOST
        return [*lines, f"and {more} more"] if more > 0 else lines


def _printable(text: str) -> str:
    """Returns text as one line without terminal control sequences and secrets."""
    return one_line(hide_in_text(hidden(text)))
