"""Measurements of a step besides the learning metrics. `Step` itself measures seconds; memory, speed and traces come
from the actors."""

from __future__ import annotations

from dataclasses import dataclass

from skyrl_mega.config.schema import Config
from skyrl_mega.models.decoder import Decoder
from skyrl_mega.rollout.slots import SlotUse
from skyrl_mega.telemetry.events import Event
from skyrl_mega.trainer import speed
from skyrl_mega.trainer.meters import Meters
from skyrl_mega.trainer.profile import Profiler
from skyrl_mega.trainer.step import Step
from skyrl_mega.trainer.timelines import Timelines


@dataclass
class Measurements:
    """The measurements of every step besides the learning metrics: memory, speed, traces and timelines."""

    config: Config
    model: Decoder
    """Architecture of the policy."""
    meters: Meters
    """Meters in the actors."""
    profiler: Profiler
    """Recorder for the steps of `telemetry.profile`."""
    slots: SlotUse | None = None
    """Use of environment slots; None without a bound by `environment.slots`."""
    timelines: Timelines | None = None
    """Writer of every step's timeline; None with `telemetry.timeline=false`."""
    drafts_suppressed: bool = False
    """True if the engines left out draft tokens in most of their steps, as reported last."""

    def begin(self, step: int, *, discard_earlier: bool) -> None:
        """Starts the measurements of a step, with a trace if `telemetry.profile` names the step.

        Args:
            step: The step's number.
            discard_earlier: True for the run's first step and after a checkpoint: the actors reset their meters, so
                that work outside of any step does not count.

        Raises:
            ActorFailed: An actor cannot start the trace.
        """
        self.profiler.begin(step)
        self.meters.begin(discard_earlier=discard_earlier)

    def end_phase(self, phase: str) -> None:
        """Asks the actors to read the meters after a phase of the step; does not wait for the answers."""
        self.meters.end_phase(phase)

    def metrics_of(self, step: Step) -> dict[str, float]:
        """Waits, at most `meters.ANSWER_TIMEOUT_S` seconds, for the readings of a finished step and returns the metrics
        `memory/*`, `perf/*`, `drafts/*` with draft tokens, and `environment/slots_used` with a bound on slots. Missing
        readings are left out."""
        metrics = self.meters.collect()
        if self.slots is not None:
            metrics["environment/slots_used"] = float(self.slots.read())
        metrics |= speed.training_speed(self.config, self.model, step.loads, step.metrics)
        seconds = step.metrics.get("time/generate")
        if seconds and self.config.asynchrony.mode == "off":  # ahead of training the engines also work in other phases
            workers, trajectories = [*self.meters.steps.values()], [*step.trajectories, *step.greedy]
            metrics |= speed.decoding_speed(self.config, self.model, workers, trajectories, seconds)
        return metrics

    def draft_change(self, step: Step) -> Event | None:
        """Returns an event if the engines began or ceased to leave out draft tokens in most of their steps, because
        drafts cost more time than they save (`rollout.drafts.adaptive`); None without a change."""
        share = step.metrics.get("drafts/suppressed")
        if share is None or (share > 0.5) == self.drafts_suppressed:
            return None
        self.drafts_suppressed = not self.drafts_suppressed
        why = "cost more time than they save" if self.drafts_suppressed else "save time again"
        text = f"Step {step.number}: {share:.0%} of the engines' steps were without draft tokens, which {why}"
        return Event("drafts", f"{text} (rollout.drafts.adaptive)", step=step.number, suppressed=share)

    def write_recordings(self, step: Step) -> dict[str, float]:
        """Writes the step's timeline and trace, each if recorded, and returns the metrics `idle/*` of the timeline and,
        on GPUs, `perf/launches` and `perf/host_syncs` of the trace; {} without recordings.

        Raises:
            ActorFailed: An actor cannot end the trace.
            OSError: A file cannot be written.
        """
        idle = self.timelines.end(step) if self.timelines else {}
        return idle | self.profiler.end(step)
