"""Measurements of a step inside the actors: memory by phase, and engine iterations.

At the end of each phase every actor is asked to read its meters, without waiting: Ray keeps the order of an actor's
calls, and the answers are ready when the step ends. A step costs a few calls per actor.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from skyrl_mega.cluster.calls import PendingCall, settle
from skyrl_mega.cluster.fleet import Fleet
from skyrl_mega.cluster.group import ActorGroup
from skyrl_mega.engines.base import Drafts
from skyrl_mega.telemetry.memory import MemoryReading

GIB = 2**30
ENGINE_PHASES = ("generate", "sync", "eval")
"""Phases followed by a reading of the engines. A phase with idle engines counts with the next of these."""
DRAFTS = "drafts"
"""Role of the engines' counts of draft tokens."""
ANSWER_TIMEOUT_S = 30.0
"""Seconds to wait for a step's answers; an actor without an answer adds nothing to the step's row."""
SUMS = (("retries", "memory/alloc_retries"), ("allocations", "memory/device_allocations"))
"""Fields of `MemoryReading` summed over a step."""


@dataclass
class Meters:
    """Collector of the actors' readings of memory and engine iterations, phase by phase of a step."""

    models: Mapping[str, ActorGroup]
    """Megatron actors by role, each with `measured() -> MemoryReading`."""
    fleet: Fleet
    """Engines, each with `measured() -> [(MemoryReading, steps)]` over the engine's workers."""
    drafts: bool = False
    """True if the engines use draft tokens, and count them: `drafts() -> Drafts`."""
    steps: dict[tuple[int, int], Counter[int]] = field(default_factory=dict)
    """(engine, worker) → Counter of tokens → iterations, for phase `generate` of the last collected step."""
    _pending: list[tuple[str, str, list[PendingCall]]] = field(default_factory=list)
    """(phase, role, calls) of the current step."""

    def begin(self, *, discard_earlier: bool) -> None:
        """Begins a step: drops the readings of an earlier step not collected. Does not wait for the actors.

        Args:
            discard_earlier: True to have the actors reset their meters, so that work outside of any step, such as a
                checkpoint, does not count.
        """
        self._pending.clear()
        if discard_earlier:
            self._ask("", engines=True)
            self._pending.clear()

    def end_phase(self, phase: str) -> None:
        """Asks all Megatron actors for a reading after a phase, and the engines after a phase of `ENGINE_PHASES`. Does
        not wait; `collect` takes the answers."""
        self._ask(phase, engines=phase in ENGINE_PHASES)

    def _ask(self, phase: str, *, engines: bool) -> None:
        for role, group in self.models.items():
            self._pending.append((phase, role, group.submit_all("measured")))
        if engines:
            self._pending.append((phase, "engine", self.fleet.submit(self.fleet.up, "measured")))
        if engines and self.drafts:
            self._pending.append((phase, DRAFTS, self.fleet.submit(self.fleet.up, "drafts")))

    def collect(self) -> dict[str, float]:
        """Waits up to `ANSWER_TIMEOUT_S` seconds for the step's readings and returns the metrics `memory/*`: maxima
        over the actors of a role in GiB, and for the readings in `SUMS` the largest reading of each phase, summed over
        the phases; with draft tokens also `drafts/*`. Also sets `steps`, and forgets the readings.

        Dead or hanging actors are skipped; the next call to such an actor will raise.
        """
        calls = [call for _, _, pending in self._pending for call in pending]
        answers: Mapping[PendingCall, Any] = settle(calls, ANSWER_TIMEOUT_S, after_failure=ANSWER_TIMEOUT_S).answers
        maxima: dict[str, float] = defaultdict(float)
        sums: Counter[str] = Counter()
        self.steps = {}
        drafts: list[Drafts] = []
        for phase, role, pending in self._pending:
            by_rank = {call.rank: answers[call] for call in pending if call in answers}
            if role == DRAFTS:
                drafts += by_rank.values()
                continue
            readings = [*by_rank.values()]
            if role == "engine":
                readings = [reading for workers in by_rank.values() for reading, _ in workers]
                if phase == "generate":
                    self._count(by_rank)
            for name, value in _metrics(phase, role, readings).items():
                maxima[name] = max(maxima[name], value)
            for key, name in SUMS:
                values = [getattr(r, key) for r in readings if getattr(r, key) is not None]
                if values:
                    sums[name] += max(values)
        self._pending.clear()
        counts = {name: float(count) for name, count in sums.items()}
        return {**maxima, **counts, **draft_metrics(drafts)}

    def _count(self, by_rank: Mapping[int, list[tuple[MemoryReading, dict[int, int]]]]) -> None:
        """Adds up engine iterations, because dynamic sampling generates in several rounds."""
        for engine, workers in by_rank.items():
            for worker, (_, steps) in enumerate(workers):
                self.steps.setdefault((engine, worker), Counter()).update(steps)


def draft_metrics(engines: Sequence[Drafts]) -> dict[str, float]:
    """Returns the metrics of a step from the counts of its engines, added up; {} if the engines wrote no token.

    `drafts/drafted` and `drafts/accepted` are numbers of tokens; `drafts/tokens_per_step` is the mean number of tokens
    written in a step of a single sequence; `drafts/acceptance` is the accepted share of the drafted tokens, left out if
    none was drafted; `drafts/suppressed` is the share of engine steps without drafts, left out if steps were not
    counted.
    """
    total = Counter[str]()
    for counts in engines:
        total.update(asdict(counts))
    steps = total["written"] - total["accepted"]  # each step of a sequence adds a token to the accepted ones
    if not steps:
        return {}
    metrics = {
        "drafts/drafted": float(total["drafted"]),
        "drafts/accepted": float(total["accepted"]),
        "drafts/tokens_per_step": total["written"] / steps,
    }
    if total["drafted"]:
        metrics["drafts/acceptance"] = total["accepted"] / total["drafted"]
    if total["steps"]:
        metrics["drafts/suppressed"] = total["suppressed"] / total["steps"]
    return metrics


def _metrics(phase: str, role: str, readings: list[MemoryReading]) -> dict[str, float]:
    """Returns maxima over all processes of a role."""
    if not readings:
        return {}
    sizes = {
        f"memory/{role}_{phase}_gib": max(r.peak for r in readings),
        "memory/host_gib": max(r.node for r in readings),
    }
    if (reserved := [r.reserved for r in readings if r.reserved is not None]) and role != "engine":
        sizes[f"memory/{role}_reserved_gib"] = max(reserved)
    if device := [r.device for r in readings if r.device is not None]:
        sizes[f"memory/device_{phase}_gib"] = max(device)
    return {name: size / GIB for name, size in sizes.items()}
