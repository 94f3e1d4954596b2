"""The terminal shared by supervisor and driver, as by a shell and its jobs.

The driver's process group runs in the background: writing is allowed, while Ctrl-C and Ctrl-Z reach the supervisor.
When the driver reads, as a debugger does, the kernel stops the driver; the supervisor then gives it the foreground.
"""

from __future__ import annotations

import os
import signal
import sys
import termios
from contextlib import suppress

SHOW_CURSOR = b"\r\x1b[K\x1b[?25h"
"""Clears a progress line and shows the cursor hidden by the progress line."""


class Terminal:
    """The terminal of this process; may be absent.

    Args:
        driver: Process group of the driver.
    """

    def __init__(self, driver: int) -> None:
        self.driver = driver
        self._fd: int | None = None
        with suppress(OSError, termios.error):
            fd = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY)
            self._fd, self._settings = fd, termios.tcgetattr(fd)

    def suspended(self, by: int) -> None:
        """Lets a driver stopped by the signal `by` continue, in the foreground if this job is there.

        After Ctrl-Z (SIGTSTP), or if this job is in the background, first stops both and waits until the shell
        continues this process. Does nothing after SIGSTOP or without a terminal: the driver stays stopped.
        """
        if self._fd is None or by == signal.SIGSTOP:  # stopped on purpose
            return
        if by == signal.SIGTSTP or not self._ours():
            self.suspend()
        if self._ours():
            with suppress(OSError):
                os.tcsetpgrp(self._fd, self.driver)
        self._continue()

    def suspend(self) -> None:
        """Stops the driver and this process with SIGSTOP. Returns once this process is continued, and continues the
        driver."""
        with suppress(ProcessLookupError):
            os.killpg(self.driver, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        self._continue()

    def restore(self, killed: bool) -> None:
        """Takes the foreground back from the driver.

        Args:
            killed: True if the driver was killed: then also restores the terminal settings and shows the cursor.
        """
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
        """Returns True if this process or the driver is in the foreground."""
        assert self._fd is not None
        try:
            return os.tcgetpgrp(self._fd) in (os.getpgrp(), self.driver)
        except OSError:  # the terminal is gone
            return True

    def _continue(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.driver, signal.SIGCONT)
