"""The metrics of a run in Prometheus' text format."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from skyrl_mega.report.live.state import RunState
from skyrl_mega.report.run_data import RETRIEVER_LOST, STUCK, RunData

CONTENT_TYPE = CONTENT_TYPE_LATEST
PREFIX = "skyrl_mega_"
FINDINGS = "health/"
"""Prefix of metrics that exist only in steps with the finding; exposed as `skyrl_mega_alarm` instead."""
RARE = "eval/"
"""Prefix of metrics measured in some steps; the newest measurement is exposed."""


def text(run: RunData, state: RunState) -> bytes:
    """Returns the content of `/metrics` in Prometheus' text format: metrics of the newest step, progress, alarms, and
    counts of events. Raises UserError if the run's events cannot be read.

    Args:
        run: The run.
        state: The state of the run.
    """
    return generate_latest(_Families([*_progress(run, state), *_metrics(run)]))


class _Families(Collector):
    """The families of a run, as `generate_latest` collects."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """Returns the families."""
        return self._families


def _progress(run: RunData, state: RunState) -> Iterator[Metric]:
    label, value = ["run"], [run.name]
    steps = [event.time for event in run.events if event.kind == "step"]
    for name, about, number in (
        ("step", "Number of finished steps.", state.step),
        ("planned_steps", "Number of steps of the whole run (run.steps).", state.planned),
        ("running", "1 while the run is under way, 0 after its end.", float(state.running and state.phase != "fault")),
        ("last_step_timestamp_seconds", "Time at which the newest step ended.", steps[-1] if steps else None),
    ):
        if number is not None:
            family = GaugeMetricFamily(f"{PREFIX}{name}", about, labels=label)
            family.add_metric(value, number)
            yield family
    alarm = GaugeMetricFamily(
        f"{PREFIX}alarm", "1 for a health finding of the newest step (docs/health.md).", labels=["run", "finding"]
    )
    active = {of.kind for of in state.alarms if of.level != "past"}
    for kind in dict.fromkeys(["fault", "actor_given_up", RETRIEVER_LOST, *(finding.kind for finding in run.findings)]):
        alarm.add_metric([run.name, kind], float(kind in active))
    yield alarm
    events = CounterMetricFamily(f"{PREFIX}events", "Events of the run by kind (events.jsonl).", labels=["run", "kind"])
    for kind, count in sorted(Counter(event.kind for event in run.events).items()):
        events.add_metric([run.name, kind], count)
    yield events


def _metrics(run: RunData) -> Iterator[Metric]:
    """Yields a family for each metric of the newest step. The label `metric` holds the name of docs/metrics.md."""
    newest = dict(run.rows[-1]) if run.rows else {}
    for row in reversed(run.rows):
        newest |= {name: value for name, value in row.items() if name.startswith(RARE) and name not in newest}
    families: dict[str, GaugeMetricFamily] = {}
    for name, number in newest.items():
        if name == "step" or (name.startswith(FINDINGS) and name not in STUCK):
            continue
        key = PREFIX + re.sub(r"[^a-zA-Z0-9_]", "_", name)
        if key not in families:
            about = f"{name} of the newest step (docs/metrics.md)."
            families[key] = GaugeMetricFamily(key, about, labels=["run", "metric"])
        families[key].add_metric([run.name, name], math.nan if number is None else number)
    yield from families.values()
