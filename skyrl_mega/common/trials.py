"""Trials of a user's code with stand-ins before a run: a time limit, and the user's line that an error came from."""

from __future__ import annotations

import signal
import sys
import threading
import traceback
from asyncio import CancelledError
from collections.abc import Iterator
from contextlib import contextmanager

LONGEST_S = 60.0
"""Seconds for a call of the user's code, whose stand-ins answer at once."""


class Endless(BaseException):
    """A call of the user's code took too long. Not an Exception, so that `except Exception` does not stop it."""


FAULTS = (Exception, BaseExceptionGroup, SystemExit, CancelledError, Endless)
"""Exceptions that are the user's fault in a trial: all but those of signals that end the command."""


@contextmanager
def limited() -> Iterator[None]:
    """Raises Endless in the `with` block after `LONGEST_S`, and again after each further `LONGEST_S`.

    Ends code that never awaits, too. Does not end code that catches every BaseException, and compiled code that ignores
    signals. Without effect outside of the main thread, because other threads receive no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(number: int, frame: object) -> None:
        raise Endless(f"did not end within {LONGEST_S:g} s, although the stand-ins answer at once")

    handler = signal.signal(signal.SIGALRM, late)
    timer = signal.setitimer(signal.ITIMER_REAL, LONGEST_S, LONGEST_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *timer)


def last_frame(error: BaseException, file: object) -> traceback.FrameSummary | None:
    """Returns the innermost line of a file in an error's traceback; None if the traceback does not contain the file."""
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame for frame in reversed(frames) if frame.filename == file), None)


def place(error: BaseException, code: object) -> str:
    """Returns ` (file, line 3)` for the innermost line of the user's file in an error's traceback.

    Args:
        error: The error.
        code: The user's class or function. A traceback without the file of its module gives the innermost line of all.
            Code without a file (`<string>`) does not count; a traceback without any other line gives ''.
    """
    file = getattr(sys.modules.get(getattr(code, "__module__", "")), "__file__", None)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    frames = [frame for frame in frames if frame.filename == file] or frames
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
