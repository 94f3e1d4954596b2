"""The one error that means: the user's input is wrong."""

from __future__ import annotations

from collections.abc import Iterable

from skyrl_mega.config.secret_names import hide_in_text
from skyrl_mega.config.secrets import hidden
from skyrl_mega.config.terminal import one_line


class UserError(Exception):
    """A mistake in what the user gave. Its text is one line: key or file, value, what is allowed, the fix.

    The launcher prints the line without a traceback and exits with code 2, before any process has started.
    """

    def __str__(self) -> str:
        """The line: nothing that it quotes breaks it, steers a terminal, or is a secret."""
        return one_line(hide_in_text(hidden(super().__str__())))

    @property
    def lines(self) -> list[str]:
        """What the command prints: a line for each mistake."""
        return [str(self)]


class UserErrors(UserError):
    """Several mistakes of one kind, such as unknown keys, that are told at once: a line each."""

    MOST = 200
    """Lines; the last one says how many more there are."""

    def __init__(self, mistakes: Iterable[str]) -> None:
        self.mistakes = list(dict.fromkeys(mistakes))
        super().__init__("; ".join(self.mistakes[: self.MOST]))

    @property
    def lines(self) -> list[str]:
        """What the command prints: a line for each mistake."""
        lines = [str(UserError(mistake)) for mistake in self.mistakes[: self.MOST]]
        more = len(self.mistakes) - self.MOST
        return [*lines, f"and {more} more"] if more > 0 else lines
