"""The terminal that a supervisor and its driver share, as a shell shares one with its jobs.

The driver has a process group of its own in the background: it may write, and Ctrl-C and Ctrl-Z reach the supervisor. A
driver that reads, as a debugger does, is stopped by the kernel; it is then given the foreground.
"""

from __future__ import annotations

import os
import signal
import sys
import termios
from contextlib import suppress

SHOW_CURSOR = b"\r\x1b[K\x1b[?25h"
"""Clears a progress line and shows the cursor, which such a line hides."""


class Terminal:
    """The terminal of this process, if it has one."""

    def __init__(self, driver: int) -> None:
        self.driver = driver
        self._fd: int | None = None
        with suppress(OSError, termios.error):
            fd = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY)
            self._fd, self._settings = fd, termios.tcgetattr(fd)

    def suspended(self, by: int) -> None:
        """The driver was stopped by a signal: gives it the foreground, or stops this process as well."""
        if self._fd is None or by == signal.SIGSTOP:  # somebody wants that
            return
        if by == signal.SIGTSTP or not self._ours():
            self.suspend()
        if self._ours():
            with suppress(OSError):
                os.tcsetpgrp(self._fd, self.driver)
        self._continue()

    def suspend(self) -> None:
        """Stops the driver and this process, until somebody continues this one."""
        with suppress(ProcessLookupError):
            os.killpg(self.driver, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        self._continue()

    def restore(self, killed: bool) -> None:
        """Takes the foreground back; makes the terminal as it was where the driver could not."""
        if self._fd is None:
            return
        with suppress(OSError, termios.error):
            if os.tcgetpgrp(self._fd) == self.driver:
                os.tcsetpgrp(self._fd, os.getpgrp())
            if killed and self._ours():
                termios.tcsetattr(self._fd, termios.TCSADRAIN, self._settings)
                if sys.stdout.isatty() or sys.stderr.isatty():
                    os.write(self._fd, SHOW_CURSOR)

    def _ours(self) -> bool:
        """Whether this process or its driver is in the foreground."""
        assert self._fd is not None
        try:
            return os.tcgetpgrp(self._fd) in (os.getpgrp(), self.driver)
        except OSError:  # the terminal is gone
            return True

    def _continue(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.driver, signal.SIGCONT)
