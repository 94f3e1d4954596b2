"""What a process's log says of its end, where the error that reached us only points there."""

from __future__ import annotations

import re
from pathlib import Path

POINTS = "root cause"
"""vLLM's errors about its own processes say that the cause stands elsewhere, and nothing else."""
LONGEST = 400
TAIL = 1 << 20
"""Bytes at a log's end that are looked at."""
ERROR = re.compile(r"(?:^|[\s\]])((?:\w+\.)*\w*(?:Error|Exception): .*)$")


def with_cause(text: str, log: str | None) -> str:
    """The text, or what the log says where the text only points to it.

    Args:
        text: One line of what happened.
        log: The log of the process that it happened in; None where it has none.
    """
    if POINTS not in text or log is None:
        return text
    found = last_error(Path(log))
    return text if found is None else f"{text[: text.index(POINTS)].rpartition(': ')[0]}: {found}"


def last_error(log: Path) -> str | None:
    """The last line of a log that names an error and is no pointer to another; None without one."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:  # another node's, on a disk of its own
        return None
    found = (match[1] for line in reversed(lines) if (match := ERROR.search(line)) and POINTS not in line)
    return next((text.strip()[:LONGEST] for text in found), None)
