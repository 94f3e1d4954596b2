"""All trackers of a run as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

from skyrl_mega.config.schema import Config
from skyrl_mega.config.secrets import masked
from skyrl_mega.telemetry.trackers import registry
from skyrl_mega.telemetry.trackers.base import TrajectoryText
from skyrl_mega.telemetry.trackers.guarded import Guarded
from skyrl_mega.telemetry.trackers.jsonl import JsonlTracker


class Trackers:
    """metrics.jsonl, which must be written, and others, which may fail. A context manager.

    Args:
        jsonl: What it raises ends the run.
        others: They get every row after it.
    """

    def __init__(self, jsonl: JsonlTracker, others: Sequence[Guarded] = ()) -> None:
        self._jsonl, self._others = jsonl, others

    @property
    def path(self) -> Path:
        """metrics.jsonl."""
        return self._jsonl.path

    def start(self, config: Config, resumed_step: int | None) -> None:
        """Before the first row, once it is known which step the run goes on after (None: from its beginning)."""
        settings = masked(asdict(config))
        self._jsonl.start(settings, resumed_step)
        for other in self._others:
            other.start(settings, resumed_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """The row of a step; it is in metrics.jsonl when this returns."""
        self._jsonl.log(step, metrics)
        figures = {name: float(value) for name, value in metrics.items()}
        for other in self._others:
            other.log(step, figures)

    def log_trajectories(self, step: int, trajectories: Sequence[TrajectoryText]) -> None:
        """Some trajectories of a step, before its row."""
        for other in self._others:
            other.log_trajectories(step, trajectories)

    def close(self, failed: bool = False) -> None:
        """Ends all of them."""
        try:
            self._jsonl.close(failed)
        finally:
            for other in self._others:
                other.close(failed)

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close(failed=isinstance(error, Exception))  # a stop by a signal is not an Exception


def open_trackers(config: Config, folder: Path, say: Callable[[str], None]) -> Trackers:
    """The trackers of a run, not yet started.

    Args:
        config: Its settings, which have been checked.
        folder: Its folder.
        say: Shows a line to the user.

    Raises:
        UserError: `telemetry` names something that does not exist.
    """
    trackers = registry.check(config.telemetry)
    others = [Guarded(name, cls(folder, options), say) for name, (cls, options) in trackers.items()]
    return Trackers(JsonlTracker(folder), others)
