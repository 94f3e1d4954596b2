"""Asynchronous rollouts in virtual time while engines join, leave and die at random: nothing is lost, doubled or too
old."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.rollout.routing.router import Router
from skyrl_mega.rollout.service import Ticket
from skyrl_mega.simulation.virtual_time import VirtualLoop
from tests.support.virtual_rollouts import Engine, Engines
from tests.trainer import test_schedules
from tests.trainer.test_schedules import Schedule

CHANCE = 0.1
"""Chance of a join and of a leave each time that the run looks."""


class Elastic(Engines):
    """Engines that join and leave. A leaving engine keeps its weights, and ends with its last request or is killed."""

    def __init__(self, count: int, random: Random) -> None:
        super().__init__(count, random)
        self.gone: set[int] = set()
        self.events = 0

    def join(self) -> None:
        """Starts an engine without weights."""
        rank = len(self.engines)
        self.engines.append(Engine(rank, self.random.choice([0.5, 1.0, 3.0])))
        self.group.actors.append(self.engines[-1].actor())
        self.facts.append(None)
        self.events += 1

    def leave(self) -> None:
        """Takes an engine out; the last one stays."""
        present = [rank for rank in range(len(self.engines)) if rank not in self.gone]
        if len(present) > 1:
            rank = self.random.choice(present)
            self.up.discard(rank)
            self.gone.add(rank)
            self.events += 1
            if self.random.random() < 0.3:  # its node is lost, or the grace is over
                super().kill(rank)

    def kill(self, rank: int) -> None:
        super().kill(self.random.randrange(len(self.engines)))
        self.events += 1

    def revive(self, version: int) -> None:
        """Syncs all engines that have not left."""
        kept = {rank: (self.engines[rank], self.group.actors[rank], self.engines[rank].version) for rank in self.gone}
        super().revive(version)
        for rank, (engine, actor, old) in kept.items():
            self.engines[rank], self.group.actors[rank], engine.version = engine, actor, old
            self.up.discard(rank)

    def hold(self, half: bool) -> None:
        """Pauses the engines that take part in the sync."""
        super().hold(half)
        for rank in self.gone:
            self.engines[rank].half = False
            self.engines[rank].running.set()


class ElasticSchedule(Schedule):
    """A run with a random event each time that the driver looks."""

    events = 0

    def _chance(self, loop: VirtualLoop, engines: Any) -> None:
        before = engines.events
        if self.random.random() < CHANCE:
            engines.join()
        if self.random.random() < CHANCE:
            engines.leave()
        self.events += engines.events - before
        super()._chance(loop, engines)


def played(seed: int, folder: Path) -> ElasticSchedule:
    folder.mkdir()
    schedule = ElasticSchedule(seed, folder)
    schedule.play().check()
    return schedule


@pytest.fixture(autouse=True)
def elastic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_schedules, "Engines", Elastic)


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(range(60), id="sixty"),
        pytest.param(range(60, 300), id="three hundred in all", marks=[pytest.mark.slow, pytest.mark.nightly]),
    ],
)
def test_no_schedule_loses_doubles_or_ages_anything(tmp_path: Path, seeds: range) -> None:
    events = sum(played(seed, tmp_path / str(seed)).events for seed in seeds)
    assert events > 100 * len(seeds) / 60, "joins, leaves and kills"


def test_an_engine_that_gets_requests_after_it_left_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets engines that left serve again with old weights: a schedule ends with tokens that are too old."""
    monkeypatch.setattr(Elastic, "serving", property(lambda self: sorted(self.up | self.gone)))
    monkeypatch.setattr(test_schedules, "LONGEST_S", test_schedules.SOON_S)
    with pytest.raises((AssertionError, RuntimeError)):
        _ = [played(seed, tmp_path / str(seed)) for seed in range(100)]


def test_a_joined_engine_gets_requests_after_the_next_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: set[int] = set()
    monkeypatch.setattr(Router, "count", staticmethod(lambda engine, change: asked.add(engine)))
    with VirtualLoop(1e4) as loop:
        random = Random(1)
        engines = Elastic(1, random)
        service = test_schedules.service_of(engines, random, loop)
        prompts = [Prompt(i, [], "mine", {}) for i in range(80)]
        engines.revive(0)
        engines.join()
        for begin, expected in ((0, {0}), (40, {0, 1})):
            tickets = [Ticket(i, i, 0, (f"{i}",)) for i in range(begin, begin + 40)]
            service.submit(tickets, prompts[begin : begin + 40])
            loop.sleep(500)
            assert asked == expected
            engines.revive(1)
            service.engines_changed()
