"""The one error that means: the user's input is wrong."""

from __future__ import annotations

from skyrl_mega.config.secrets import hidden
from skyrl_mega.config.terminal import one_line


class UserError(Exception):
    """A mistake in what the user gave. Its text is one line: key or file, value, what is allowed, the fix.

    The launcher prints the line without a traceback and exits with code 2, before any process has started.
    """

    def __str__(self) -> str:
        """The line: nothing that it quotes breaks it, steers a terminal, or was taken from the environment."""
        return one_line(hidden(super().__str__()))
