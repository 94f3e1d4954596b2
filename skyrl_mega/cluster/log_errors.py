"""Root causes from log files, for errors that only point to a log."""

from __future__ import annotations

import re
from pathlib import Path

POINTS = "root cause"
"""Mark of an error without its cause: vLLM only points to a log when a process of its own fails."""
LONGEST = 400
"""Most characters of an error from a log."""
TAIL = 1 << 20
"""Bytes read from the end of a log."""
ERROR = re.compile(r"(?:^|[\s\]])((?:\w+\.)*\w*(?:Error|Exception): .*)$")


def with_cause(text: str, log: str | None) -> str:
    """Returns the text of a failure. A pointer to the log (the words `POINTS`) is replaced by the last error in the
    log; without an error there, or with an unreadable log, the text is unchanged.

    Args:
        text: A single line about the failure.
        log: Log file of the failed process; None if there is none.
    """
    if POINTS not in text or log is None:
        return text
    error = last_error(Path(log))
    return text if error is None else f"{text[: text.index(POINTS)].rpartition(': ')[0]}: {error}"


def last_error(log: Path) -> str | None:
    """Returns the last error in the last `TAIL` bytes of a log, its class and text, at most `LONGEST` characters;
    ignores lines with `POINTS`. None without an error, and for a log unreadable on this node."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:  # the log may be on the local disk of another node
        return None
    errors = (match[1] for line in reversed(lines) if (match := ERROR.search(line)) and POINTS not in line)
    return next((text.strip()[:LONGEST] for text in errors), None)
