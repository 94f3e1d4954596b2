"""The one error that means: the user's input is wrong."""


class UserError(Exception):
    """A mistake in what the user gave. Its text is one line: key or file, value, what is allowed, the mend.

    The launcher prints the line without a traceback and exits with code 2, before any process has started.
    """
