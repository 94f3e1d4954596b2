"""Environment variables of commands, without keys and tokens of this process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

OWN_PROGRAMS, SYSTEMS_PROGRAMS = Path(sys.prefix) / "bin", "/usr/local/bin:/usr/bin:/bin"
"""Folders of this interpreter's programs and of the system's."""
KEPT = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"),
)
"""Variables of this process that an unconfined command receives."""


def inside() -> dict[str, str]:
    """Returns the environment variables of a confined command, none of them of this process: `PATH`, `LANG`,
    `PYTHONDONTWRITEBYTECODE`, `OPENBLAS_NUM_THREADS` and `OMP_NUM_THREADS`. The jail adds `HOME` and `TMPDIR`, its
    folder."""
    quiet = {"PYTHONDONTWRITEBYTECODE": "1", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    return {"PATH": f"{OWN_PROGRAMS}:{SYSTEMS_PROGRAMS}", "LANG": "C.UTF-8", **quiet}


def of_this_user() -> dict[str, str]:
    """Returns the environment variables of an unconfined command: those of this process in `KEPT`, with this
    interpreter's programs first in `PATH`."""
    kept = {name: value for name, value in os.environ.items() if name in KEPT}
    return kept | {"PATH": f"{OWN_PROGRAMS}:{kept.get('PATH', SYSTEMS_PROGRAMS)}"}
