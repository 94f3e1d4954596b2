"""Tracker interface: a tracker stores a run's metrics step by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class TrajectoryText:
    """A trajectory as readable text."""

    prompt: str
    response: str
    """Everything after the prompt, observations included."""
    reward: float
    status: str
    environment: str


class Tracker(Protocol):
    """Stores a run's metrics. Created as `Cls(folder, options)` with the run's folder and `telemetry.options.<name>`.

    The methods are called in this order, in a thread used by this tracker alone, so slow calls are allowed. An
    exception is reported once and the call is retried (guarded.py). A class may declare options in `OPTIONS`
    (config/options.py; without `OPTIONS`, all are accepted), and may offer a class method `check_ready(options)`, which
    raises `UserError` if a package or an API key is missing, before anything of the run is started.
    """

    def start(self, config: Mapping[str, Any], resumed_step: int | None) -> str | None:
        """Starts the run, or continues the run after `resumed_step` (None: from the beginning).

        A resumed run repeats the steps after its checkpoint; the tracker must not store these steps twice.

        Args:
            config: All settings, nested by group, with secrets masked.
            resumed_step: Last step of the checkpoint.

        Returns:
            A line for the user, such as the run's address; None for no message.
        """
        ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Stores the metrics of a step (docs/metrics.md). Values may be NaN or infinite.

        Within a start, steps only increase; step 0 is the evaluation before training, often with other names. A retried
        call repeats its step, also if a part was stored, and so does a run resumed from an earlier step.
        """
        ...

    def log_trajectories(self, step: int, trajectories: Sequence[TrajectoryText]) -> str | None:
        """Stores some trajectories of a step, before the step's metrics. Returns a line for the user, or None."""
        ...

    def close(self, failed: bool = False) -> None:
        """Ends the run in the tracker.

        Args:
            failed: True if an error ended the run; False if it finished or was stopped by a signal.
        """
        ...
