"""Network threads of gloo in a process."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path


def gloo_threads(process: int | str = "self") -> int:
    """Returns the number of a process's network threads of gloo, by the name that each thread gives itself."""
    names = []
    for thread in Path(f"/proc/{process}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            names.append((thread / "comm").read_text().strip())
    return names.count("gloo_tcp_loop")


def settled_gloo_threads(expected: int) -> int:
    """Waits up to 30 s until this process has `expected` network threads; returns their number."""
    deadline = time.monotonic() + 30
    while gloo_threads() != expected and time.monotonic() < deadline:
        time.sleep(0.05)
    return gloo_threads()
