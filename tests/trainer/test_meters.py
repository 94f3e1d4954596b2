"""Measurements of a step: the actors called, and the metrics made from their answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from skyrl_mega.cluster.calls import Outcomes, PendingCall
from skyrl_mega.telemetry.memory import MemoryReading
from skyrl_mega.trainer import meters
from skyrl_mega.trainer.meters import GIB, Meters

ANSWERS: dict[str, Any] = {}
"""Answers by the reference of a call."""


class Actors:
    """Actors with prepared answers (`answers`, one list per rank); None stands for a dead actor."""

    def __init__(self, name: str, answers: list[list[Any]]) -> None:
        self.name, self.up = name, list(range(len(answers)))
        self.answers: list[Iterator[Any]] = [iter(of_rank) for of_rank in answers]
        self.asked = 0

    def submit_all(self, method: str) -> list[PendingCall]:
        return self.submit(self.up, method)

    def submit(self, ranks: list[int], method: str) -> list[PendingCall]:
        assert method == "measured"
        calls = []
        for rank in ranks:
            self.asked += 1
            reference = f"{self.name}: {self.asked}"
            ANSWERS[reference] = next(self.answers[rank])
            calls.append(PendingCall(self.name, rank, method, reference))
        return calls


def meters_of(models: dict[str, Any], engines: Any) -> Meters:
    """Returns the meters of stand-in actors."""
    return Meters(models, engines)


@pytest.fixture(autouse=True)
def answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `settle` return the prepared answers."""

    def settle(calls: list[PendingCall], timeout: float, after_failure: float) -> Outcomes:
        return Outcomes(timeout, {call: ANSWERS[call.ref] for call in calls if ANSWERS[call.ref]}, [], [])

    monkeypatch.setattr(meters, "settle", settle)


def host(peak: float, node: float = 1.0, **cuda: int) -> MemoryReading:
    return MemoryReading(int(peak * GIB), int(node * GIB), **cuda)


def test_memory_is_the_most_of_all_ranks_by_phase() -> None:
    policy = Actors("policy", [[host(99), host(1), host(5)], [host(99), host(2, node=7.0), host(4)]])
    engines = Actors("engine", [[[(host(99), {})], [(host(3), {4: 2})], [(host(2.5), {9: 9})]]])
    policy.answers = [iter([*a, host(1)]) for a in policy.answers]
    metered = meters_of({"policy": policy}, engines)
    metered.begin(discard_earlier=True)  # measurements from before the step
    metered.end_phase("generate")
    metered.end_phase("train")
    metered.end_phase("sync")
    assert metered.collect() == {
        "memory/policy_generate_gib": 2,
        "memory/policy_train_gib": 5,
        "memory/engine_generate_gib": 3,
        "memory/policy_sync_gib": 1,
        "memory/engine_sync_gib": 2.5,
        "memory/host_gib": 7,
    }
    assert metered.steps == {(0, 0): {4: 2}}, "only those of the phase that generates"
    assert policy.asked == 8 and engines.asked == 3, "one call for each actor and phase, and one before"
    metered.begin(discard_earlier=False)
    assert policy.asked == 8 and metered.collect() == {}, "a step's answers are its own"


def test_rounds_of_a_phase_add_up_and_the_dead_have_no_figures() -> None:
    engines = Actors("engine", [[[(host(1), {4: 2})], [(host(3), {4: 1, 5: 1})]], [None, None]])
    metered = meters_of({}, engines)
    metered.end_phase("generate")
    metered.end_phase("generate")
    assert metered.collect()["memory/engine_generate_gib"] == 3
    assert metered.steps == {(0, 0): {4: 3, 5: 1}}


def test_a_gpus_events_are_summed_over_phases() -> None:
    cuda = dict(reserved=8 * GIB, device=20 * GIB)
    first, second = host(5, **cuda, retries=1, allocations=10), host(6, **cuda, retries=0, allocations=4)
    metered = meters_of({"policy": Actors("policy", [[first, second]])}, Actors("engine", []))
    metered.end_phase("logprobs")
    metered.end_phase("train")
    figures = metered.collect()
    assert (figures["memory/alloc_retries"], figures["memory/device_allocations"]) == (1, 14)
    assert (figures["memory/policy_reserved_gib"], figures["memory/device_train_gib"]) == (8, 20)
