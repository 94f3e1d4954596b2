"""All that is measured of a step beside what it learns: seconds are `Step`'s own; memory, speed and traces are asked of
the actors."""

from __future__ import annotations

from dataclasses import dataclass

from skyrl_mega.config.schema import Config
from skyrl_mega.models.decoder import Decoder
from skyrl_mega.rollout.slots import SlotUse
from skyrl_mega.trainer import speed
from skyrl_mega.trainer.meters import Meters
from skyrl_mega.trainer.profile import Profiler
from skyrl_mega.trainer.step import Step
from skyrl_mega.trainer.timelines import Timelines


@dataclass
class Measurements:
    """Of one run."""

    config: Config
    model: Decoder
    """The policy's."""
    meters: Meters
    """In the actors."""
    profiler: Profiler
    """Records the steps of `telemetry.profile`."""
    slots: SlotUse | None = None
    """Of environments, where `environment.slots` bounds them."""
    timelines: Timelines | None = None
    """Writes every step down; None with `telemetry.timeline=false`."""

    def begin(self, step: int, *, after_more: bool) -> None:
        """Before a step. `after_more`: it is the run's first, or a checkpoint has been written since the last."""
        self.profiler.begin(step)
        self.meters.begin(after_more=after_more)

    def ended(self, phase: str) -> None:
        """A phase of the step has ended."""
        self.meters.ended(phase)

    def of(self, step: Step) -> dict[str, float]:
        """Metrics of a step that is done: `memory/*` and `perf/*`."""
        found = self.meters.collect()
        if self.slots is not None:
            found["environment/slots_used"] = float(self.slots.read())
        found |= speed.of_training(self.config, self.model, step.loads, step.metrics)
        seconds = step.metrics.get("time/generate")
        if seconds and self.config.asynchrony.mode == "off":  # ahead of a step engines work in all of its phases
            workers, played = [*self.meters.steps.values()], [*step.trajectories, *step.greedy]
            found |= speed.of_decoding(self.config, self.model, workers, played, seconds)
        return found

    def recorded(self, step: Step) -> dict[str, float]:
        """Writes the step's timeline, and its trace, where it has one; metrics that only these have."""
        idle = self.timelines.end(step) if self.timelines else {}
        return idle | self.profiler.end(step)
