"""One RL step under way: its number, metrics and phases."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from skyrl_mega.planner.flops import Load
from skyrl_mega.rollout.trajectory import Trajectory
from skyrl_mega.telemetry.console import Console, Phase
from skyrl_mega.telemetry.trace import Span, day


@dataclass
class Step:
    """One RL step: its number, its metrics, and its phases."""

    number: int
    console: Console
    metrics: dict[str, float] = field(default_factory=dict)
    trajectories: list[Trajectory] = field(default_factory=list)
    """All that were drawn, also those that dynamic sampling left out."""
    greedy: list[Trajectory] = field(default_factory=list)
    """Answers that samples are compared with: in the file of trajectories, and in no figure of samples."""
    look: Callable[[], None] = lambda: None
    """Raises where the run is to end."""
    ended: Callable[[str], None] = lambda phase: None
    """Told of every phase that has ended, and of moves before one as `residency`."""
    arrange: Callable[[str], Mapping[str, float]] = lambda phase: {}
    """Brings about what a phase needs, and measures it; sums over the step."""
    start: float = field(default_factory=time.perf_counter)
    spans: list[Span] = field(default_factory=list)
    """Its phases, and the moves before them."""
    loads: dict[str, Load] = field(default_factory=dict)
    """By phase what the policy's ranks computed on, in forward passes: an optimizer step is worth three."""

    @contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator[Phase]:
        """Times a phase as `time/<name>` and shows its progress; a phase that is entered again adds up."""
        self.look()
        start = time.perf_counter()
        if moved := self.arrange(name):
            self._add(moved)
            self.spans.append(Span("residency", day(start), day(time.perf_counter()), {"for": name, **moved}))
            self.ended("residency")  # what a phase has is not what left or came before it
        start = time.perf_counter()
        with self.console.phase(name, total) as progress:
            yield progress
        end = time.perf_counter()
        self._add({f"time/{name}": end - start})
        self.spans.append(Span(name, day(start), day(end)))
        self.ended(name)

    def computed(self, phase: str, load: Load, passes: float = 1.0) -> None:
        """The policy's ranks have computed so many forward passes on this in a phase."""
        self.loads[phase] = self.loads.get(phase, Load()) + load * passes

    def _add(self, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + value

    def record(self, metrics: dict[str, float]) -> None:
        """Adds metrics under their full names."""
        self.metrics.update(metrics)
