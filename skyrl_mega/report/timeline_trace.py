"""Steps of a run as a Perfetto trace with a common time axis: phases as spans, requests and calls as counters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from skyrl_mega.cluster.atomic_output import atomic_file
from skyrl_mega.common.errors import UserError
from skyrl_mega.telemetry.concurrency_series import ConcurrencySeries
from skyrl_mega.telemetry.step_timeline import CRITIC, POLICY, StepTimeline
from skyrl_mega.telemetry.trace import DRIVER, ENGINES, ENVIRONMENTS, PER_RANK, RANKS, Span, TraceWriter, is_trace

GAP_S = 0.01
"""Seconds between two steps from which the activity in between is unknown."""


def write(steps: Sequence[StepTimeline], file: Path) -> None:
    """Writes a trace of some steps for ui.perfetto.dev; replaces an existing file only if it is such a trace.

    Args:
        steps: The steps; not empty.
        file: Output path; must end in `.json.gz`.

    Raises:
        UserError: The name has another ending, or the file cannot be written.
    """
    if not file.name.endswith(".json.gz"):
        raise UserError("allowed: a name that ends in .json.gz", key="--trace", value=file)
    try:
        with atomic_file(file, f"--trace {file}", is_trace) as part, TraceWriter(part, steps[0].shown) as trace:
            _fill(trace, steps)
    except OSError as error:
        raise UserError(
            f"{error.strerror}; allowed: a file in a folder that you may write to", key="--trace", value=file
        ) from error


def _fill(trace: TraceWriter, steps: Sequence[StepTimeline]) -> None:
    phases = [span for step in steps for span in step.phases]
    whole = [Span(f"step {step.step}", step.start, step.end, step.idle()) for step in steps]
    trace.process(DRIVER, "driver", [*whole, *phases], "phases", nested=True)
    trace.process(ENVIRONMENTS, "environments", [], "calls", nested=True)
    trace.count(ENVIRONMENTS, "calls", _points([step.environments for step in steps]))
    for number in range(max(len(step.engines) for step in steps)):
        syncs = [Span(f"weights of step {s.step}", p.start, p.end) for s in steps for p in s.phases if p.name == "sync"]
        trace.process(ENGINES + number, f"engine-{number}", syncs, "sync", nested=True)
        counts = [step.engines[number] for step in steps if number < len(step.engines)]
        trace.count(ENGINES + number, "requests", _points(counts))
    for place, (name, group) in enumerate((("policy", POLICY), ("critic", CRITIC))):
        if spans := [span for span in phases if span.name in group]:
            trace.process(RANKS + place * PER_RANK, name, spans, "phases", nested=True)


def _points(counts: Sequence[ConcurrencySeries]) -> Iterator[tuple[float, float]]:
    """Yields (time, count from this time on); 0 for unknown times."""
    ends = [*(after.times[0] - before.times[-1] > GAP_S for before, after in pairwise(counts)), True]
    for counted, ends_here in zip(counts, ends, strict=True):
        yield from zip(counted.times[:-1].tolist(), counted.counts.tolist(), strict=True)
        if ends_here:
            yield float(counted.times[-1]), 0.0
