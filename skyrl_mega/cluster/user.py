"""The user of this process where the system does not know one, as in a container that runs under a number."""

from __future__ import annotations

import os
import pwd
import tempfile


def name_user() -> None:
    """Sets USER and HOME if this process's user has no entry in the system's list: libraries ask for both, and fail.

    Variables that are set stay as they are; processes that are started from here have them too.
    """
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        os.environ.setdefault("USER", f"user-{os.getuid()}")
        os.environ.setdefault("HOME", tempfile.gettempdir())
