"""The combined trackers of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

from skyrl_mega.common.secrets import masked
from skyrl_mega.config.schema import Config
from skyrl_mega.telemetry.trackers import registry
from skyrl_mega.telemetry.trackers.base import TrajectoryText
from skyrl_mega.telemetry.trackers.guarded import Guarded
from skyrl_mega.telemetry.trackers.jsonl import JsonlTracker


class Trackers:
    """metrics.jsonl, which must be written, and other trackers, which may fail. A context manager.

    Args:
        jsonl: Errors of this tracker end the run.
        others: Receive every row after `jsonl`.
    """

    def __init__(self, jsonl: JsonlTracker, others: Sequence[Guarded] = ()) -> None:
        self._jsonl, self._others = jsonl, others

    @property
    def path(self) -> Path:
        """Path of metrics.jsonl."""
        return self._jsonl.path

    def start(self, config: Config, resumed_step: int | None) -> None:
        """Starts all trackers; call before the first row. Rows after `resumed_step` are removed from metrics.jsonl;
        raises OSError if this file cannot be written. Does not wait for other trackers; their failures raise nothing.

        Args:
            config: The settings; secrets are masked.
            resumed_step: Last step of the checkpoint; None for a run from the beginning, which removes all rows.
        """
        settings = masked(asdict(config))
        self._jsonl.start(settings, resumed_step)
        for other in self._others:
            other.call("start", settings, resumed_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs the metrics of a step; metrics.jsonl contains the row when this returns, else OSError is raised. Does
        not wait for other trackers; their failures raise nothing."""
        self._jsonl.log(step, metrics)
        figures = {name: float(value) for name, value in metrics.items()}
        for other in self._others:
            other.call("log", step, figures)

    def log_trajectories(self, step: int, trajectories: Sequence[TrajectoryText]) -> None:
        """Passes some trajectories of a step to all trackers but metrics.jsonl; does not wait. Call it before `log`."""
        for other in self._others:
            other.call("log_trajectories", step, trajectories)

    def close(self, failed: bool = False) -> None:
        """Closes all trackers, and waits up to `guarded.CLOSE_S` seconds for each.

        Args:
            failed: True if the run failed.
        """
        try:
            self._jsonl.close(failed)
        finally:
            for other in self._others:
                other.close(failed)

    def __enter__(self) -> Trackers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(failed=isinstance(error, Exception))  # a stop by a signal is not an Exception


def open_trackers(config: Config, folder: Path, say: Callable[[str], None]) -> Trackers:
    """Returns the trackers of a run, not yet started: metrics.jsonl, which is created here, and the configured ones.

    Args:
        config: Settings of the run, already checked.
        folder: The run's folder.
        say: Shows a line to the user.

    Raises:
        UserError: A tracker is unknown, listed twice or no tracker class, or its options are wrong.
        OSError: metrics.jsonl cannot be opened.
    """
    trackers = registry.check(config.telemetry)
    others = [Guarded(name, cls(folder, options), say) for name, (cls, options) in trackers.items()]
    return Trackers(JsonlTracker(folder), others)
