"""An RL step in progress: number, metrics and phases."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from skyrl_mega.planner.flops import PassWork
from skyrl_mega.telemetry.console import Console, Phase
from skyrl_mega.telemetry.trace import Span, wall_clock
from skyrl_mega.trajectories.trajectory import Trajectory


@dataclass
class Step:
    """An RL step with metrics, phases and trajectories."""

    number: int
    console: Console
    metrics: dict[str, float] = field(default_factory=dict)
    """The step's metrics by full name."""
    trajectories: list[Trajectory] = field(default_factory=list)
    """All trajectories sampled for the step, including groups dropped by dynamic sampling."""
    greedy: list[Trajectory] = field(default_factory=list)
    """Greedy baseline answers, written with the trajectories but excluded from all sample metrics."""
    raise_if_ending: Callable[[], None] = lambda: None
    """Raises an exception if the run must end."""
    on_phase_end: Callable[[str], None] = lambda phase: None
    """Callback after each phase; receives the phase's name, or `residency` after moves between host and device."""
    prepare: Callable[[str], Mapping[str, float]] = lambda phase: {}
    """Moves model parts to or from the devices before a phase; returns metrics, summed over the step."""
    start: float = field(default_factory=time.perf_counter)
    """`time.perf_counter()` at the beginning of the step."""
    spans: list[Span] = field(default_factory=list)
    """Spans of phases and of the moves before phases."""
    rounds: int = 0
    """Rounds of sampling so far; each has random streams of its own."""
    loads: dict[str, PassWork] = field(default_factory=dict)
    """Work of the policy's ranks by phase, in forward passes; an optimizer step counts as three."""

    @contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator[Phase]:
        """Times the body of the `with` block as metric `time/<name>` in seconds, and yields the progress display. Times
        of repeated phases add up. A body that raises adds nothing.

        Before the phase starts, `prepare` moves model parts.

        Args:
            name: Name of the phase.
            total: Number of items, for the progress display; None if unknown.

        Raises:
            Exception: `raise_if_ending` or `prepare` raised it, before the body.
        """
        self.raise_if_ending()
        start = time.perf_counter()
        if move_metrics := self.prepare(name):
            self._accumulate(move_metrics)
            self.spans.append(
                Span("residency", wall_clock(start), wall_clock(time.perf_counter()), {"for": name, **move_metrics})
            )
            self.on_phase_end("residency")  # separates the memory peak of the moves from the peak of the phase
        start = time.perf_counter()
        with self.console.phase(name, total) as progress:
            yield progress
        end = time.perf_counter()
        self._accumulate({f"time/{name}": end - start})
        self.spans.append(Span(name, wall_clock(start), wall_clock(end)))
        self.on_phase_end(name)

    def add_load(self, phase: str, load: PassWork, passes: float = 1.0) -> None:
        """Adds the work of `passes` forward passes over `load` to `loads[phase]`."""
        self.loads[phase] = self.loads.get(phase, PassWork()) + load * passes

    def _accumulate(self, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + value

    def record(self, metrics: dict[str, float]) -> None:
        """Sets metrics under their full names; a value recorded before under the same name is replaced."""
        self.metrics.update(metrics)
