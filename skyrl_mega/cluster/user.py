"""User name and home folder for a process without an entry in the system's user list, as in a container with a numeric
user."""

from __future__ import annotations

import os
import pwd
import tempfile


def set_user_variables() -> None:
    """Sets USER and HOME if the user of this process is unknown to the system: libraries fail without both.

    Existing variables are kept; child processes inherit both.
    """
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        os.environ.setdefault("USER", f"user-{os.getuid()}")
        os.environ.setdefault("HOME", tempfile.gettempdir())
