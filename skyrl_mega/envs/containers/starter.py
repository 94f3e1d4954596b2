"""A user's program that starts a container somewhere else, and removes the container at its own end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from tempfile import TemporaryFile

from skyrl_mega.common.terminal import one_line
from skyrl_mega.envs.faults import InfrastructureFault

MOST_LINE = 8192
"""Maximum size of the program's first line in bytes."""
PAUSE_S = 0.05


class StarterProgram:
    """A running program. Its standard input stays open until `end`, and closes at the end of this process too, even by
    SIGKILL: the program then removes its container and ends.

    Args:
        argv: Program and arguments.

    Raises:
        InfrastructureFault: The program cannot be started.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        self.name = argv[0]
        self._out, self._err = TemporaryFile(), TemporaryFile()  # noqa: SIM115 - closed in `end`
        try:
            self._process = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=self._out, stderr=self._err, start_new_session=True
            )
        except OSError as error:
            self._close_files()
            raise InfrastructureFault(f"{self.name} cannot be started: {error.strerror}") from error

    def ended(self) -> bool:
        """Returns True if the program has ended, and with the program its container."""
        return self._process.poll() is not None

    def first_line(self, timeout_s: float) -> str:
        """Waits for the program's first line on standard output and returns the line.

        Raises:
            InfrastructureFault: The program ended without a line, printed no line in `timeout_s` seconds, or printed
                `MOST_LINE` bytes without a line break.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            ended = self.ended()
            line, complete, _ = os.pread(self._out.fileno(), MOST_LINE, 0).partition(b"\n")
            if complete:
                return line.decode(errors="replace").strip()
            if len(line) == MOST_LINE:
                raise InfrastructureFault(
                    f"{self.name} printed {MOST_LINE} bytes without a line break{self._last_words()}"
                )
            if ended or time.monotonic() > deadline:
                why = f"ended with exit code {self._process.returncode}" if ended else f"ran for {timeout_s:g} s"
                raise InfrastructureFault(f"{self.name} {why} without a first line{self._last_words()}")
            time.sleep(PAUSE_S)

    def end(self, timeout_s: float) -> None:
        """Closes the program's input and waits for its end; after `timeout_s` seconds kills the program with its
        process group. May be called again.

        Raises:
            InfrastructureFault: The program had to be killed, or failed: its container may still exist.
        """
        if self._out.closed:
            return
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            if self._process.wait(timeout_s):
                raise InfrastructureFault(f"{self.name} failed to remove its container{self._last_words()}")
        except subprocess.TimeoutExpired as error:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            raise InfrastructureFault(f"{self.name} did not end {timeout_s:g} s after its input") from error
        finally:
            self._close_files()

    def _last_words(self) -> str:
        """Returns the end of the program's standard error, after a colon; an empty text without words."""
        size = os.fstat(self._err.fileno()).st_size
        words = os.pread(self._err.fileno(), 600, max(0, size - 600)).decode(errors="replace").strip()
        return f": {one_line(words, 300)}" if words else ""

    def _close_files(self) -> None:
        self._out.close()
        self._err.close()
