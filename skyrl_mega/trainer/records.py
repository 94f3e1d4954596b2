"""Trajectory files of a run, written in a background thread while the ranks train."""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from skyrl_mega.trajectories import parquet
from skyrl_mega.trajectories.trajectory import Trajectory

log = logging.getLogger(__name__)


class Records:
    """Writes one trajectory file at a time, in the order of the calls. Errors surface in the next call."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "records")
        self._writing: Future[None] | None = None

    def write(self, file: Path, trajectories: list[Trajectory], *, columns: bool) -> None:
        """Starts writing a trajectory file in the background (see `parquet.write_apart`) and returns. Waits first for
        the previous file, so that no more than one step's trajectories are kept.

        Args:
            file: Path of the file.
            trajectories: The trajectories; must not change until the file is complete.
            columns: True to write all columns of the tokens, too.

        Raises:
            ClusterError: The arrays of the previous file's trajectories are lost, or writing took too long.
            OSError: The previous file could not be written.
        """
        self.wait()
        self._writing = self._thread.submit(parquet.write_apart, file, trajectories, columns=columns)

    def wait(self) -> None:
        """Waits until the file of the last `write` is complete; returns at once if there is none, or if an earlier call
        has waited for it or raised its error.

        Raises:
            ClusterError: The trajectories' arrays are lost, or writing took too long.
            OSError: The file could not be written.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def close(self) -> None:
        """Waits, without limit, for the last file and ends the thread. An error is only logged, as a fault may already
        end the run."""
        self._thread.shutdown()
        if self._writing is not None and (error := self._writing.exception()):
            log.warning("the last trajectory file was not written: %s", error)
