"""Isolation of trackers: a tracker that fails or hangs has no effect on the run. Uses a thread per tracker and bounded
retries."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from skyrl_mega.config.secrets import masked
from skyrl_mega.telemetry.trackers.base import Tracker, TrajectoryText

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
    """A tracker behind a queue. All methods return at once and never raise.

    Args:
        name: Name in `telemetry.trackers`.
        tracker: Called only from this object's thread.
        say: Shows a line to the user.
    """

    def __init__(self, name: str, tracker: Tracker, say: Callable[[str], None]) -> None:
        self._name, self._tracker, self._say = name, tracker, say
        self._calls: queue.Queue[Callable[[], Any] | None] = queue.Queue()
        self._closing = threading.Event()
        self._off = self._warned = self._failed = self._left = False
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)

    def start(self, config: Mapping[str, Any], resumed_step: int | None) -> None:
        """Queues `Tracker.start` and shows the returned line to the user."""
        self._thread.start()
        self._add(lambda: self._tracker.start(config, resumed_step))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queues the metrics of a step for the tracker's `log`."""
        self._add(lambda: self._tracker.log(step, metrics))

    def log_trajectories(self, step: int, trajectories: Sequence[TrajectoryText]) -> None:
        """Queues trajectories of a step for the tracker's `log_trajectories`, and shows the returned line to the
        user."""
        self._add(lambda: self._tracker.log_trajectories(step, trajectories))

    def close(self, failed: bool = False) -> None:
        """Ends the tracker within `CLOSE_S` seconds; calls that still fail or hang are abandoned."""
        if not self._thread.is_alive():
            return
        self._failed = failed
        self._closing.set()
        self._calls.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            self._off = True
            self._report(f"has not finished within {CLOSE_S:g} s of the run's end and is left; {KEPT}")
            self._left = True

    def _add(self, call: Callable[[], Any]) -> None:
        if self._off:
            return
        if self._calls.qsize() >= MAX_QUEUED:
            self._off = True
            self._report(f"is off for the rest of the run: {MAX_QUEUED} calls wait for it; {KEPT}")
            return
        self._calls.put(call)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            if not self._off:
                self._call(call)
        self._call_once(lambda: self._tracker.close(self._failed), "failed at the end of the run")

    def _call(self, call: Callable[[], Any]) -> None:
        """Runs a call, with a retry after each of `WAITS_S`; if the run ends meanwhile, the last retry is immediate."""
        for wait in WAITS_S:
            try:
                self._report_line(call())
            except Exception as error:
                if not self._warned:
                    self._warned = True
                    self._report(
                        f"failed: {one_line(error)}; the run continues, the call is tried again up to "
                        f"{len(WAITS_S)} times, within {sum(WAITS_S):g} s; {KEPT}"
                    )
                if self._closing.wait(wait):
                    break
            else:
                return
            if self._off:
                return
        if not self._call_once(call, "is off for the rest of the run"):
            self._off = True

    def _call_once(self, call: Callable[[], Any], consequence: str) -> bool:
        """Runs a call and returns True on success; reports a failure."""
        try:
            self._report_line(call())
        except Exception as error:
            self._report(f"{consequence}: {one_line(error)}; {KEPT}")
            return False
        return True

    def _report_line(self, line: str | None) -> None:
        if line:
            self._report(line)

    def _report(self, text: str) -> None:
        if not self._left:
            self._say(f"tracker {self._name} {text}")


def one_line(error: Exception) -> str:
    """Returns an error's type and text in a line of at most 500 characters, without secrets."""
    return str(masked(f"{type(error).__name__}: {' '.join(str(error).split())}"))[:500]
