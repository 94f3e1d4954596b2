"""Environment variables of commands: none of this process's keys and tokens is among them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

KEPT = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"),
)
"""Variables of this process that an unconfined command receives."""


def inside() -> dict[str, str]:
    """Returns the environment variables of a confined command. The jail adds `HOME` and `TMPDIR`, its folder."""
    path = f"{Path(sys.prefix) / 'bin'}:/usr/local/bin:/usr/bin:/bin"
    quiet = {"PYTHONDONTWRITEBYTECODE": "1", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    return {"PATH": path, "LANG": "C.UTF-8", **quiet}


def of_this_user() -> dict[str, str]:
    """Returns the environment variables of an unconfined command: those of this process in `KEPT`."""
    return {name: value for name, value in os.environ.items() if name in KEPT}
