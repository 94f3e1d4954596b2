"""What actors measure of a step: memory by phase, and the steps of engines.

At the end of each phase every actor is told to read its meters, and nobody waits: Ray hands an actor's calls on in
order, and the answers are there when the step ends. A step costs a few calls for each actor, whatever is measured.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from skyrl_mega.cluster.fleet import Fleet
from skyrl_mega.cluster.group import ActorGroup, Call, settle
from skyrl_mega.telemetry.memory import Reading

GIB = 2**30
ENGINES_WORK = ("generate", "sync", "eval")
"""Phases after which engines are asked; a phase in which they wait counts with the next of these."""
WAIT_S = 30.0
"""For the answers of a step; who has not answered then has no figures in its row."""
SUMS = (("retries", "memory/alloc_retries"), ("allocations", "memory/device_allocations"))
"""Of a `Reading`, what adds up over a step."""


@dataclass
class Meters:
    """Of one run."""

    models: Mapping[str, ActorGroup]
    """Megatron's actors, by role: each has `measured() -> Reading`."""
    fleet: Fleet
    """Engines, each with `measured() -> [(Reading, steps)]` of its workers."""
    steps: dict[tuple[int, int], Counter[int]] = field(default_factory=dict)
    """Of (engine, its worker) in the phase `generate` of the last step that was collected: tokens → steps."""
    _asked: list[tuple[str, str, list[Call]]] = field(default_factory=list)
    """(phase, role, calls) of the step under way."""

    def begin(self, *, after_more: bool) -> None:
        """A step begins. `after_more`: actors did something since the last one, which belongs to none."""
        self._asked.clear()
        if after_more:
            self._ask("", engines=True)
            self._asked.clear()

    def ended(self, phase: str) -> None:
        """A phase has ended."""
        self._ask(phase, engines=phase in ENGINES_WORK)

    def _ask(self, phase: str, *, engines: bool) -> None:
        for role, group in self.models.items():
            self._asked.append((phase, role, group.submit_all("measured")))
        if engines:
            self._asked.append((phase, "engine", self.fleet.submit(self.fleet.up, "measured")))

    def collect(self) -> dict[str, float]:
        """The step's metrics, `memory/*`. Whoever died or stands still has none; the next call to it says so."""
        calls = [call for _, _, asked in self._asked for call in asked]
        answers: Mapping[Call, Any] = settle(calls, WAIT_S, after_failure=WAIT_S).answers
        most: dict[str, float] = defaultdict(float)
        sums: Counter[str] = Counter()
        self.steps = {}
        for phase, role, asked in self._asked:
            given = {call.rank: answers[call] for call in asked if call in answers}
            readings = [*given.values()]
            if role == "engine":
                readings = [reading for workers in given.values() for reading, _ in workers]
                if phase == "generate":
                    self._count(given)
            for name, value in _metrics(phase, role, readings).items():
                most[name] = max(most[name], value)
            for key, name in SUMS:
                found = [getattr(r, key) for r in readings if getattr(r, key) is not None]
                if found:
                    sums[name] += max(found)
        self._asked.clear()
        return {**most, **{name: float(count) for name, count in sums.items()}}

    def _count(self, given: Mapping[int, list[tuple[Reading, dict[int, int]]]]) -> None:
        """Adds steps of engines: dynamic sampling generates in several rounds."""
        for engine, workers in given.items():
            for worker, (_, steps) in enumerate(workers):
                self.steps.setdefault((engine, worker), Counter()).update(steps)


def _metrics(phase: str, role: str, readings: list[Reading]) -> dict[str, float]:
    """The most of all processes of a role."""
    if not readings:
        return {}
    found = {
        f"memory/{role}_{phase}_gib": max(r.peak for r in readings),
        "memory/host_gib": max(r.node for r in readings),
    }
    if (reserved := [r.reserved for r in readings if r.reserved is not None]) and role != "engine":
        found[f"memory/{role}_reserved_gib"] = max(reserved)
    if device := [r.device for r in readings if r.device is not None]:
        found[f"memory/device_{phase}_gib"] = max(device)
    return {name: size / GIB for name, size in found.items()}
