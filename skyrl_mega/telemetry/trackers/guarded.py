"""Isolation of trackers: a tracker that fails or hangs has no effect on the run. Uses a thread per tracker and bounded
retries."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from skyrl_mega.common.secrets import masked
from skyrl_mega.telemetry.trackers.base import Tracker

WAITS_S = (10.0, 60.0, 300.0)
"""Seconds before each retry of a failed call; after the last failed retry the tracker is off for the rest of
the run."""
MAX_QUEUED = 256
"""Maximum number of queued calls, reached if a call hangs or takes longer than a step; above this, the tracker is
turned off."""
CLOSE_S = 30.0
"""Seconds to wait at the end of a run for the tracker's remaining calls."""
KEPT = "metrics.jsonl has every step"


class Guarded:
    """A tracker behind a queue, with a thread started by the first call. No method raises; only `close` waits.

    Args:
        name: Name in `telemetry.trackers`.
        tracker: Called only from this object's thread.
        say: Shows a line to the user.
    """

    def __init__(self, name: str, tracker: Tracker, say: Callable[[str], None]) -> None:
        self._name, self._tracker, self._say = name, tracker, say
        self._calls: queue.Queue[tuple[str, tuple[Any, ...]] | None] = queue.Queue()
        self._closing = threading.Event()
        self._off = self._warned = self._abandoned = self._failed = False
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)

    def call(self, method: str, *arguments: Any) -> None:
        """Queues a call of a method of the tracker for its thread; a line returned by the method is shown to the user.

        Drops the call if the tracker is off or `MAX_QUEUED` calls are waiting, which turns the tracker off.
        """
        if self._thread.ident is None:
            self._thread.start()
        if self._calls.qsize() < MAX_QUEUED:
            self._calls.put((method, arguments))
        elif not self._off:
            self._turn_off(f"{MAX_QUEUED} calls are waiting, as it hangs or takes longer than a step")

    def close(self, failed: bool = False) -> None:
        """Finishes queued calls, closes the tracker and waits at most `CLOSE_S` seconds; then abandons the tracker.
        Does nothing if no call was queued before.

        Args:
            failed: True if the run failed; passed to the tracker's `close`.
        """
        if self._thread.ident is None:
            return
        self._failed = failed
        self._closing.set()
        self._calls.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            self._report(
                f"has not finished within {CLOSE_S:g} s of the run's end and is left; it may lack steps, {KEPT}"
            )
            self._off = self._abandoned = True

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            self._retry(*call)
        if error := self._error_of("close", self._failed):
            self._report(f"failed at the end of the run: {error}; {KEPT}")

    def _retry(self, method: str, arguments: tuple[Any, ...]) -> None:
        """Runs a call, with a retry after each of `WAITS_S`; if the run ends meanwhile, the last retry is immediate."""
        waits = iter(WAITS_S)
        while not self._off and (error := self._error_of(method, *arguments)):
            if (wait := next(waits, None)) is None:
                return self._turn_off(error)
            if not self._warned:
                self._warned = True
                self._report(
                    f"failed: {error}; the run continues, the call is tried again up to {len(WAITS_S)} times, within "
                    f"{sum(WAITS_S):g} s; {KEPT}"
                )
            if self._closing.wait(wait):
                waits = iter(())
        return None

    def _error_of(self, method: str, *arguments: Any) -> str:
        """Runs a call; returns the error in a line, or an empty text."""
        try:
            if line := getattr(self._tracker, method)(*arguments):
                self._report(line)
        except Exception as error:
            return one_line(error)
        return ""

    def _turn_off(self, reason: str) -> None:
        self._off = True
        self._report(f"is off for the rest of the run: {reason}; {KEPT}")

    def _report(self, text: str) -> None:
        if not self._abandoned:
            self._say(f"tracker {self._name} {text}")


def one_line(error: Exception) -> str:
    """Returns type and text of an error as one line of at most 500 characters, without secrets."""
    return str(masked(f"{type(error).__name__}: {' '.join(str(error).split())}"))[:500]
