"""An evaluation during asynchronous rollouts: two routers on the same engines, and an engine found dead by the other
router."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from skyrl_mega.cluster.fleet import NoServingActor
from skyrl_mega.engines.base import Request, Sampling
from skyrl_mega.rollout.routing.router import Router
from skyrl_mega.simulation.virtual_time import VirtualLoop
from tests.support.virtual_rollouts import Engine


class Fleet:
    """A fleet of one engine; any router may retire the engine."""

    def __init__(self) -> None:
        self.engine = Engine(0, 1.0)
        self.engine.running.set()
        self.serving, self.facts = [0], [None]
        self.group = SimpleNamespace(actors=[self.engine.actor()], name="engine")

    def die(self) -> None:
        """Removes the engine; the replacement has no weights yet."""
        self.serving = []
        self.group.actors[0] = None

    def retire(self, rank: int, error: BaseException | str) -> None:
        self.serving = []

    def check(self) -> None:
        if not self.serving:
            raise NoServingActor("engine", 0, "service", "killed")


def asked_after_its_death(service: bool) -> Any:
    """Sends a request after another router found the engine dead, and returns the result."""
    fleet: Any = Fleet()

    async def ask() -> Any:
        router = Router(fleet, Sampling(), 4, 60.0, service=service)
        await router.generate(Request("first", [1], 2, seed=0))
        fleet.die()
        return await asyncio.wait_for(router.generate(Request("second", [1], 2, seed=0)), 1000)

    with VirtualLoop() as loop:
        return loop.run(ask())


def test_a_phase_ends_and_is_played_again() -> None:
    with pytest.raises(NoServingActor):
        asked_after_its_death(service=False)


def test_a_service_waits_for_the_next_sync() -> None:
    with pytest.raises(TimeoutError):
        asked_after_its_death(service=True)
