"""`telemetry.profile`: records a step as a trace of driver phases, engines, environments and policy ranks."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

from skyrl_mega.cluster.calls import gather, settle
from skyrl_mega.cluster.fleet import Fleet
from skyrl_mega.cluster.group import ActorGroup
from skyrl_mega.config.schema.run import ProfileConfig
from skyrl_mega.rollout.generator import Generator
from skyrl_mega.telemetry.trace import DRIVER, ENGINES, ENVIRONMENTS, Span, TraceWriter
from skyrl_mega.trainer.step import Step

START_S = 600.0
"""Seconds for a rank to start recording: CUPTI needs some."""
WRITE_S = 3600.0
"""Seconds for a rank to write a recording, possibly gigabytes."""
ANSWER_S = 60.0


class Profiler:
    """Records the steps named in the settings; does nothing in other steps.

    Args:
        config: The steps and policy ranks to record.
        folder: The run's folder, visible to every rank.
        policy: The policy's ranks.
        fleet: The engines.
        generator: Runs the trajectories.
        say: Prints the path of the trace.
    """

    def __init__(
        self,
        config: ProfileConfig,
        folder: Path,
        policy: ActorGroup,
        *,
        fleet: Fleet,
        generator: Generator,
        say: Callable[[str], None],
    ) -> None:
        self.config, self.folder = config, folder.absolute() / "profile"
        self.policy, self.fleet, self.generator, self.say = policy, fleet, generator, say
        self.zero = 0.0

    def begin(self, step: int) -> None:
        """Starts recording before a step of `telemetry.profile.steps`; does nothing before other steps. An engine that
        fails to record is only missing in the trace.

        Raises:
            ActorFailed: A policy rank failed, or did not start within `START_S` seconds.
        """
        if step not in self.config.steps:
            return
        self.zero = time.time()
        gather([self.policy.submit(rank, "start_profile") for rank in self.config.ranks], START_S)
        settle(self.fleet.submit(self.fleet.up, "record_spans", True), ANSWER_S, after_failure=ANSWER_S)
        self.generator.spans = []

    def end(self, step: Step) -> dict[str, float]:
        """Stops recording after a recorded step, writes the trace `profile/step_<number>.json.gz` into the run's
        folder, replacing an earlier one, and prints its path; does nothing after other steps.

        Returns:
            On GPUs `perf/launches` and `perf/host_syncs`, maxima over the recorded ranks; else {}.

        Raises:
            ActorFailed: A policy rank failed, or did not write its part within `WRITE_S` seconds.
            OSError: The trace could not be written.
        """
        if step.number not in self.config.steps or self.generator.spans is None:
            return {}
        whole = Span(f"step {step.number}", self.zero, time.time(), {"metrics": step.metrics})
        parts = self.folder / f".step_{step.number}"
        files = [parts / f"policy-{rank}.gz" for rank in self.config.ranks]
        writing = [
            self.policy.submit(rank, "stop_profile", str(file), whole)
            for rank, file in zip(self.config.ranks, files, strict=True)
        ]
        calls_to_engines = self.fleet.submit(self.fleet.up, "record_spans", False)
        spans = settle(calls_to_engines, ANSWER_S, after_failure=ANSWER_S).answers
        counts = gather(writing, WRITE_S)
        environments, self.generator.spans = self.generator.spans, None
        file = self.folder / f"step_{step.number}.json.gz"
        with TraceWriter(file, self.zero) as trace:
            trace.process(DRIVER, "driver", [whole, *step.spans], "phases", nested=True)
            trace.process(ENVIRONMENTS, "environments", environments, "environment")
            for call, spans_of_engine in spans.items():
                trace.process(ENGINES + call.rank, call.actor, spans_of_engine, "requests")
            for part in files:
                trace.append(part)
        shutil.rmtree(parts, ignore_errors=True)
        self.say(f"step {step.number} is recorded: open {file} at ui.perfetto.dev")
        return {f"perf/{name}": max(count[name] for count in counts) for name in (counts[0] if counts else {})}
