"""Snapshots of a run's folder, rendered once for all viewers when a file changed."""

from __future__ import annotations

import gzip
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from skyrl_mega.common.errors import UserError
from skyrl_mega.report import overview, run_data
from skyrl_mega.report.live import prometheus
from skyrl_mega.report.live.state import RunState, state_of

log = logging.getLogger(__name__)

WATCHED = ("config.yaml", "metrics.jsonl", "events.jsonl", "estimate.json", "timeline", "checkpoints")
"""Files and folders of a run with content of the page. The time of a folder changes with the entries."""
SHARE = 20.0
"""Seconds of pause per second of rendering: the page takes at most a twentieth of a core."""


@dataclass(frozen=True)
class Snapshot:
    """The replies of the page, as bytes."""

    version: str
    """Unique text of this snapshot, also across processes."""
    page: bytes
    """HTML of the report, UTF-8."""
    zipped_page: bytes
    """`page` compressed by gzip."""
    metrics: bytes
    """Reply for Prometheus."""
    state: RunState
    """Progress and alarms."""
    seconds: float
    """CPU seconds of rendering."""


class Follower:
    """Renders a run's folder to snapshots, again after each change of its files.

    Args:
        folder: The run's folder.
        is_running: Returns False after the end of the run.
    """

    def __init__(self, folder: Path, is_running: Callable[[], bool]) -> None:
        self.folder, self._is_running = folder, is_running
        self.running = is_running()
        """False after the end of the run."""
        self.newest: Snapshot | None = None
        self.problem = ""
        """Reason why the folder could not be read; empty after a success."""
        self._seen: object = None
        self._count = 0

    def look(self) -> None:
        """Checks the folder for changes, and if any renders a new snapshot into `newest`; takes a while for a long run.

        Never raises for an unreadable folder: `newest` then stays, and `problem` has the reason.
        """
        self.running = self._is_running()
        seen = self.running, tuple(map(_stamp, (self.folder / name for name in WATCHED)))
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self.newest = self._rendered()
            self.problem = ""
        except (UserError, OSError) as error:  # such as a folder that a new run is moving to `earlier/`
            self.problem = str(error)
        except Exception as error:  # a fault of the page's own code must not end the page
            self.problem = f"the page cannot be rendered: {type(error).__name__}: {error}"
            log.warning("%s", self.problem, exc_info=True)

    def _rendered(self) -> Snapshot:
        start = time.thread_time()
        run = run_data.read(self.folder)
        state = state_of(run, self.running)
        self._count += 1
        version = f"{os.getpid()}-{time.time_ns()}-{self._count}"
        page = overview.page([run], live=version).encode(errors="replace")
        metrics = prometheus.text(run, state)
        zipped = gzip.compress(page, 5, mtime=0)
        return Snapshot(version, page, zipped, metrics, state, time.thread_time() - start)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        state = path.stat()
    except OSError:  # absent, or a file system that is away
        return None
    return state.st_mtime_ns, state.st_size, state.st_ino
