"""What a tracker is: the place that a run's figures go to, step by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class TrajectoryText:
    """A trajectory for people to read."""

    prompt: str
    response: str
    """All that follows the prompt, observations included."""
    reward: float
    status: str
    environment: str


class Tracker(Protocol):
    """Takes a run's figures. `Cls(folder, options)` makes one: the run's folder, and `telemetry.options.<name>`.

    The methods are called in this order, from one thread that is the tracker's own; they may take their time. An
    exception is told once and the call is tried again (guarded.py). A class may have `OPTIONS`, which declares its
    options (config/options.py; without it any are taken), and `check_ready(options)`, a class method that raises
    `UserError` where a package or an API key is missing, before anything of the run is started.
    """

    def start(self, config: Mapping[str, Any], resumed_step: int | None) -> str | None:
        """The run begins, or goes on after `resumed_step` (None: from its beginning).

        A resumed run repeats the steps after its checkpoint: what the tracker holds of them must not be there twice.

        Args:
            config: Every setting, nested by group, secrets masked.
            resumed_step: The last step of the checkpoint.

        Returns:
            A line for the user, such as the run's address; None where there is nothing to say.
        """
        ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """The row of a step (docs/metrics.md). A figure may be NaN or infinite. Steps only rise."""
        ...

    def log_trajectories(self, step: int, trajectories: Sequence[TrajectoryText]) -> str | None:
        """Some trajectories of a step, before its row. Returns a line for the user, or None."""
        ...

    def close(self, failed: bool = False) -> None:
        """The run is over: finished, stopped by a signal, or `failed`."""
        ...
