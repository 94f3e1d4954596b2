"""The error type for wrong user input."""

from __future__ import annotations

from collections.abc import Iterable

from skyrl_mega.config.secret_names import hide_in_text
from skyrl_mega.config.secrets import hidden
from skyrl_mega.config.terminal import one_line


class UserError(Exception):
    """A mistake in user input. The text is a single line: key or file, value, allowed values, fix.

    The launcher prints the line without a traceback and exits with code 2, before any process has started.
    """

    def __str__(self) -> str:
        """Returns the error line, without line breaks, terminal control sequences or secrets."""
        return one_line(hide_in_text(hidden(super().__str__())))

    @property
    def lines(self) -> list[str]:
        """Lines for the terminal: a line per mistake."""
        return [str(self)]


class UserErrors(UserError):
    """Several mistakes of the same kind, such as unknown keys, reported together with a line each."""

    MOST = 200
    """Maximum number of lines; a last line counts the rest."""

    def __init__(self, mistakes: Iterable[str]) -> None:
        self.mistakes = list(dict.fromkeys(mistakes))
        super().__init__("; ".join(self.mistakes[: self.MOST]))

    @property
    def lines(self) -> list[str]:
        """Lines for the terminal: a line per mistake."""
        lines = [str(UserError(mistake)) for mistake in self.mistakes[: self.MOST]]
        more = len(self.mistakes) - self.MOST
        return [*lines, f"and {more} more"] if more > 0 else lines
